"""Every setting of every command, and the checks that run before heavy imports.

Dataclasses with ranges (`train`, `control`, `memory`, `validation`), how they are read
from files and flags (`reader`), and what a value may be (`types`). Nothing here imports torch,
diffusers or numpy, so a mistake in a flag is one line within a second
(tests/settings/test_light.py measures it)."""
