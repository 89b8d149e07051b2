"""The commands of `pip install`, each run as its module is with `python -m`."""

from runpy import run_module


def scan() -> None:
    """silentbad-scan"""
    run_module("silentbad_shield.scan", run_name="__main__", alter_sys=True)


def search() -> None:
    """silentbad-search"""
    run_module("silentbad_shield.search", run_name="__main__", alter_sys=True)
