"""The microworld: a picture grammar at 64x64 in which composition can be measured exactly; its
renderer, its data sets, and the training of the bundled pipeline and detector. Nothing here is
needed for other pictures."""
