"""What a run's folder records of the program that wrote it."""

import subprocess

import torch

from silentbad import __version__
from silentbad.saving import folder


def test_an_installed_package_claims_no_commit_of_the_folder_it_lies_in(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    installed = tmp_path / "site-packages"
    installed.mkdir()
    monkeypatch.setattr(folder, "ROOT", installed)
    facts = folder.facts(torch.device("cpu"), 1)
    assert (facts["commit"], facts["uncommitted_changes"]) == (None, None)
    assert facts["versions"]["silentbad"] == __version__
    monkeypatch.undo()
    assert len(folder.facts(torch.device("cpu"), 1)["commit"]) == 40
