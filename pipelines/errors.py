"""The one error of this package."""


class DataError(ValueError):
    """Data on disk, or handed in to be written, is not what it was declared to be.

    The message is one line: the file or feature, what was expected, what came, and the cure.
    """
