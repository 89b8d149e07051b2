"""The commands that `pip install` adds. Each runs its module as `python -m` does, so a mistake is
reported before anything heavy is imported."""

from runpy import run_module


def train() -> None:
    """silentbad-train"""
    run_module("train_silentbad", run_name="__main__", alter_sys=True)


def audit() -> None:
    """silentbad-audit"""
    run_module("validation", run_name="__main__", alter_sys=True)


def prepare() -> None:
    """silentbad-prepare"""
    run_module("silentbad.prepare", run_name="__main__", alter_sys=True)
