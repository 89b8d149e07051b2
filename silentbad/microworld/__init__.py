"""The microworld: a picture grammar at 64x64 in which composition can be measured exactly."""
