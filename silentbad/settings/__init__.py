"""Every setting of every command, and what is refused before anything heavy is imported.

Dataclasses with ranges (`train`, `control`, `memory`, `validation`, `guard`), how they are read
from files and flags (`reader`), and what a value may be (`types`). Nothing here imports torch,
diffusers or numpy, so a mistake in a flag is one line within a second (`python -m bench.start`
measures it)."""

from silentbad.settings.reader import (
    FLAGS,
    Loader,
    answer,
    dumped,
    help_text,
    key_lines,
    key_tree,
    placed,
    plain_types,
    read,
    read_file,
    read_yaml,
)

__all__ = [
    "FLAGS",
    "Loader",
    "answer",
    "dumped",
    "help_text",
    "key_lines",
    "key_tree",
    "placed",
    "plain_types",
    "read",
    "read_file",
    "read_yaml",
]
