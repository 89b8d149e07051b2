"""report.html of a run folder, or a comparison of several runs.

    python -m silentbad.report RUN [--placebo RUN]
    python -m silentbad.report compare RUN RUN ... [--out compare.html]

Its tables are computed in silentbad/recovery/sections.py and evidence.py; the HTML of a table is the macro `table` of
silentbad/recovery/templates/macros.html.j2.
"""

import sys

from silentbad.recovery.report import main

if __name__ == "__main__":
    sys.exit(main())
