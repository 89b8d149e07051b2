"""report.html of a run folder, or a comparison of several runs.

python -m silentbad.report RUN [--placebo RUN] [--withheld RUN]
python -m silentbad.report compare RUN RUN ... [--out compare.html]
"""

from silentbad.errors import exit_with
from silentbad.settings.commands import ReportOptions
from silentbad.settings.startup import early, options


def main() -> int:
    """Parses the command line before the slow imports of the report."""
    settings = early(options, ReportOptions, None, __doc__)
    from silentbad.report import run_report

    return run_report.main(options=settings)


if __name__ == "__main__":
    exit_with(main)
