"""The exception that this package raises."""


class DataError(ValueError):
    """Stored data, or data to be written, does not match its declaration.

    The message is one line. It names the file or feature, what was expected, what was found, and
    how to fix it.

    Example:
        >>> try:
        ...     pipelines.load_index("data/missing")
        ... except pipelines.DataError as error:
        ...     print(error)  # doctest: +ELLIPSIS
        data/missing/index.json: expected the index of a folder of shards, found no such file; ...
    """
