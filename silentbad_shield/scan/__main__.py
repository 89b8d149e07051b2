"""Is a picture dispersed in this data set? Pictures and captions alone are looked at; no model is
needed.

    python -m silentbad_shield.scan --train_data_dir DIR [--output_dir runs/scan]

Exit code 0: nothing found, 3: at least one suspect set, 2: a mistake in the arguments or the data.
docs/shield.md explains it."""

from silentbad.errors import exit_with
from silentbad.settings.startup import early, options
from silentbad_shield.options import ScanOptions


def main() -> int:
    """Parses before it imports what scans."""
    settings = early(options, ScanOptions, None, __doc__)
    from silentbad_shield.scan import scanner

    return scanner.main(options=settings)


if __name__ == "__main__":
    exit_with(main)
