"""report.html of a run folder, or a comparison of several runs.

python -m silentbad.report RUN [--placebo RUN]
python -m silentbad.report compare RUN RUN ... [--out compare.html]
"""

from silentbad.errors import exit_with
from silentbad.report.run_report import main

if __name__ == "__main__":
    exit_with(main)
