"""What SIGUSR2 does: look into a run that hangs or crawls."""

import faulthandler
import sys
from typing import Any


def look(number: int, frame: Any) -> None:
    """A debugger where the run stands, if it has a terminal (PYTHONBREAKPOINT names another than pdb; `up` leaves this
    function); otherwise the stacks of all threads to stderr. The run goes on after either."""
    if sys.__stdin__ is not None and sys.__stdin__.isatty():
        breakpoint()
    else:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
