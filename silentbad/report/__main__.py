"""report.html of a run folder, or a comparison of several runs.

python -m silentbad.report RUN [--placebo RUN]
python -m silentbad.report compare RUN RUN ... [--out compare.html]
"""

from silentbad.errors import exit_with
from silentbad.settings.command import early
from silentbad.settings.commands import report_options


def main() -> int:
    """Parses before it imports what draws."""
    options = early(report_options)
    from silentbad.report import run_report

    return run_report.main(options=options)


if __name__ == "__main__":
    exit_with(main)
