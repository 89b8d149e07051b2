"""Worlds in which composition can be measured exactly, each a generator of pictures, captions and
masks. No other package imports them; `microworld` is the procedural one, with the bundled base and
detector."""
