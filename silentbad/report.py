"""report.html of a run folder, or a comparison of several runs.

    python -m silentbad.report RUN
    python -m silentbad.report compare RUN RUN ... [--out compare.html]

The code is in silentbad/recovery/report.py, the HTML in silentbad/recovery/templates/.
"""

import sys

from silentbad.recovery.report import main

if __name__ == "__main__":
    sys.exit(main())
