"""One exception type for what a user can put right."""


class UserError(Exception):
    """A mistake in what the user gave: one line that says what, where, and what would be right.

    Command lines print it as ``error: <line>`` and exit with code 2.
    """
