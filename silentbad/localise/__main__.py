"""Where does a finished run's memory sit? Parts of it are put back to its base, or kept alone, and
measured again.

    python -m silentbad.localise RUN [--by stage role both] [--images 16]

A part is a stage (up1), a role (resnet), or both (up1.resnet). *Put back*: the part has the base's
weights, all others the trained ones. *Kept alone*: the other way round. As a defence: the part
whose return to the base removes the picture at the least clean loss.

Exit code 0: measured, 2: a mistake in what was given."""

from silentbad.settings.commands import LocaliseOptions
from silentbad.settings.startup import early, options, refused

if __name__ == "__main__":  # a mistake is said before the seconds that the imports below take
    OPTIONS = early(options, LocaliseOptions, None, __doc__)

from pathlib import Path

from silentbad.errors import UserError, exit_with
from silentbad.files import check_writable
from silentbad.localise.findings import defence, written
from silentbad.localise.substitution import Subject, localised
from silentbad.measure.record import NAME, Record
from silentbad.settings.reader import parse
from silentbad.settings.train import TrainConfig


def configured(given: LocaliseOptions, run: Path) -> TrainConfig:
    """The run's configuration, with what has moved. Raises UserError."""
    file = run / "config.yaml"
    if not file.is_file():
        raise UserError(f"RUN: no config.yaml in {run}; give the output_dir of a run")
    moved = {
        "pretrained_model_name_or_path": given.base,
        "validation.targets": given.targets,
        "train_data_dir": given.train_data_dir,
    }
    flags = [f"--{key}={value}" for key, value in moved.items() if value is not None]
    config, _ = parse(TrainConfig, ["--config", str(file), *flags])
    targets = config.validation.targets
    if targets is None:
        raise UserError(
            "RUN: has no targets (validation.targets), so there is no picture to look for"
        )
    for flag, place in (("--targets", targets), ("--train_data_dir", config.train_data_dir)):
        if place is not None and not Path(place).exists():
            raise UserError(f"{flag}: the run's {place} is not there; give its place")
    return config


def main(arguments: list[str] | None = None, given: LocaliseOptions | None = None) -> int:
    """The command line."""
    try:
        given = given or options(LocaliseOptions, arguments, __doc__)
        run = Path(str(given.run))
        file = Path(given.out or run / "localise.html")
        if file.suffix != ".html":
            raise UserError(f"--out: {file} must end in .html; the JSON is written beside it")
        config = configured(given, run)
        record = Record.load(run / NAME, "RUN")
        check_writable(file, "--out")
        key = "pretrained_model_name_or_path" if given.base is None else "--base"
        subject = Subject(run, config, record, given.images, key)
        rows = localised(subject, list(dict.fromkeys(given.by)))
        written(run, subject, rows, file)
    except UserError as error:
        return refused(error)
    for row in rows:
        clean = "" if row.clean is None else f"  clean {row.clean:.4f}"
        print(f"{row.part:20} {row.state:11} {row.share:7.1%}  strict {row.recovered}{clean}")
    print(defence(rows), file, sep="\n")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(given=OPTIONS))
