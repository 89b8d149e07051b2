"""Does a model give back a picture that nobody named?

    python -m silentbad_shield.search --pipeline DIR_OR_ID (--phrases FILE | --scan FILE |
        --train_data_dir DIR)

Exit code 0: none comes back, 3: at least one does, 2: a mistake. docs/shield.md explains it."""

from silentbad.errors import exit_with
from silentbad.settings.startup import early, options
from silentbad_shield.options import SearchOptions


def main() -> int:
    """Parses before it imports what searches."""
    settings = early(options, SearchOptions, None, __doc__)
    from silentbad_shield.search import unknown

    return unknown.main(options=settings)


if __name__ == "__main__":
    exit_with(main)
