"""Files and folders that a command reads are there; nothing is opened."""

import os

from silentbad.errors import UserError
from silentbad.files import names_folder


def check_pipeline(key: str, path: str) -> None:
    """Refuse a path that is neither a folder nor the name of a pipeline on the Hub."""
    if not os.path.exists(path) and (names_folder(path) or "/" not in path):
        raise UserError(f"{key}: no folder {path}")


def target_file(targets: str | None) -> str | None:
    """The file or folder that `validation.targets` names, its choice of numbers (folder@100-109)
    left out."""
    if targets is None or os.path.exists(targets):
        return targets
    return targets.rpartition("@")[0] or targets


def check_target_file(targets: str) -> None:
    """Refuse targets that are not there."""
    file = target_file(targets)
    if file is None or not os.path.exists(file):
        raise UserError(f"targets: no file {file}")
