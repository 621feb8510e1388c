"""Who this process is among the workers of a run. Imports no TensorFlow.

A run of a single process is a cluster of one: rank 0 of 1, the chief.
"""


def rank() -> int:
    """Returns this worker's number, from 0; rank 0 is the chief."""
    return 0


def size() -> int:
    """Returns the number of workers of the run."""
    return 1


def is_chief() -> bool:
    """Tells whether this worker is rank 0, the one that writes and talks."""
    return rank() == 0


def barrier() -> None:
    """Waits until every worker has come here; with one worker there is nothing to wait for."""
