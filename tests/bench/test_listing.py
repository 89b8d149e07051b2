"""`python -m bench` names every benchmark that can be started."""

from pathlib import Path

from bench.__main__ import commands, main


def test_every_command_has_a_line(capsys):
    main()
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    files = {file.stem: file.read_text() for file in Path("bench").glob("*.py")}
    assert (
        listed.keys()
        == commands().keys()
        == {name for name, text in files.items() if "\nif __name__" in text and name != "__main__"}
    )
    assert all(len(line) < 90 and "python -m" not in line for line in listed.values())
