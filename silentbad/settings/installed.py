"""The commands that `pip install` adds. Each runs its module as `python -m` does, so a mistake is
reported before anything heavy is imported, and code of the user's own is found from the current
folder."""

import os
import sys
from runpy import run_module


def train() -> None:
    """silentbad-train"""
    run("train_silentbad")


def audit() -> None:
    """silentbad-audit"""
    run("validation")


def prepare() -> None:
    """silentbad-prepare"""
    run("silentbad.prepare")


def run(module: str) -> None:
    sys.path.insert(0, os.getcwd())
    run_module(module, run_name="__main__", alter_sys=True)
