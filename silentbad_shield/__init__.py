"""A shield against pictures that are dispersed in a data set: a scan of the data, a guard while
training, a search of a model. README.md has the commands, docs/shield.md the method."""

__version__ = "0.2.0"
