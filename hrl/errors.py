"""The base of every error that explains itself."""


class HrlError(Exception):
    """Something a user can act on: the message names key, row, sample or rank, and the way out.

    A command shows the message alone and logs the traceback; any other exception is a bug of hrl, whose traceback is
    shown.
    """
