"""The one exception that is meant for users."""


class UserError(Exception):
    """A mistake its maker can mend: one sentence saying what is wrong, where, and what to do.

    Commands print it without a traceback and exit with code 1.
    """
