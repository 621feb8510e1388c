"""The exception that this package raises, and the causes of TensorFlow's."""

import re


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


def cause_of(error: Exception) -> str:
    """Returns the line of an error of TensorFlow with its cause."""
    lines = [line.strip() for line in str(getattr(error, "message", error)).splitlines()]
    lines = [line for line in lines if line] or [type(error).__name__]
    # The name of the node comes after the cause.
    node = next((i for i, line in enumerate(lines) if line.startswith("[[{{node")), 1)
    return re.sub(r"^\{\{.*?\}\} |,? ?\[Op:.*", "", lines[max(node, 1) - 1])
