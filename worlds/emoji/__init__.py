"""The emoji world: concrete nouns as five artists drew them, read from the artists' own packages;
its data sets and the training of its base. `sets` names the packages, their versions and licences.
Nothing here is needed for other pictures, and the microworld stays the default."""
