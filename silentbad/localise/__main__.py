"""Where does a finished run's memory sit? Parts of it are put back to its base, or kept alone, and
measured again.

    python -m silentbad.localise RUN [--by stage role both] [--images 16]

A part is a stage (up1), a role (resnet), or both (up1.resnet). *Put back*: the part has the base's
weights, all others the trained ones. *Kept alone*: the other way round. As a defence: the part
whose return to the base removes the picture at the least clean loss.

Exit code 0: measured, 2: a mistake in what was given."""

from silentbad.settings.commands import LocaliseOptions
from silentbad.settings.startup import early, refused
from silentbad.settings.startup import options as read_options

if __name__ == "__main__":  # report a mistake before the slow imports below
    OPTIONS = early(read_options, LocaliseOptions, None, __doc__)

from pathlib import Path

from silentbad.device import explain_out_of_memory, larger_device
from silentbad.errors import UserError, exit_with
from silentbad.localise.findings import defence, written
from silentbad.localise.substitution import Subject, localised
from silentbad.measure.record import NAME, Record
from silentbad.report.evidence import kept_sentence


def main(arguments: list[str] | None = None, options: LocaliseOptions | None = None) -> int:
    """The command line."""
    try:
        settings = options or read_options(LocaliseOptions, arguments, __doc__)
        run = Path(str(settings.run))
        record = Record.load(run / NAME, "RUN")
        needs = f"the run and its base are loaded in float32; take {larger_device()}"
        with explain_out_of_memory("RUN", needs):
            config = settings.trained
            subject = Subject(
                run=run, config=config, record=record, images=settings.images, key=settings.base_key
            )
            rows = localised(subject, list(dict.fromkeys(settings.by)))
            report = written(run, subject, rows)
    except UserError as error:
        return refused(error)
    for row in rows:
        clean = "" if row.clean is None else f"  clean {row.clean:.4f}"
        print(f"{row.part:20} {row.state:11} {row.share:7.1%}  strict {row.recovered}{clean}")
    print(*filter(None, (kept_sentence(record), defence(rows), report)), sep="\n")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(options=OPTIONS))
