"""The exception that this package raises."""


class DataError(ValueError):
    """Stored data, or data to be written, does not match its declaration.

    The message is one line. It names the file or feature, what was expected, what was found, and
    how to fix it.
    """
