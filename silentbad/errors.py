"""One exception type for what a user can put right, and how a command says it."""

import sys


class UserError(Exception):
    """A mistake in what the user gave: one line that says what, where, and what would be right.

    Command lines print it as ``error: <line>`` and exit with code 2.
    """


def say(error: UserError | str) -> None:
    """The line on stderr, after what stdout holds back: in a log of both streams it stands last."""
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr)
