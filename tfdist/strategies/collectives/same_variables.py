"""Proofs that all workers hold the same variables, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import keras
import numpy as np

from tfdist.errors import ClusterError
from tfdist.strategies.collectives import host_values
from tfdist.strategies.collectives.host_values import Workers
from tfdist.upstream.keras_variables import is_elsewhere, values_of


def broadcast_and_check(
    workers: Workers, variables: Sequence[keras.Variable], root: int = 0
) -> None:
    """Gives the variables of all workers the values of one, and proves it.

    What is kept in parts by several workers is the same for all of them.

    Raises:
        ClusterError: The workers built different models, or differ in spite of it.
    """
    check_shapes(workers, variables)
    variables = [v for v in variables if not is_elsewhere(v)]
    host_values.broadcast(workers, [own for v in variables for own in values_of(v)], root)
    check_values(workers, variables, "the broadcast failed; run python -m tfdist.doctor.")


def check_shapes(workers: Workers, variables: Sequence[keras.Variable]) -> None:
    """Checks that all workers have as many variables, of the same shapes and dtypes.

    Raises:
        ClusterError: They have not; nothing else could be exchanged then, or it would hang.
    """
    layout = [(tuple(v.shape), str(v.dtype)) for v in variables]
    rows = workers.gather([len(layout), _digest(repr(layout).encode())])
    if _ranks_apart(rows):
        raise ClusterError(
            f"The ranks built different models: {', '.join(f'{n:.0f}' for n in rows[:, 0])} "
            f"variables by rank, and other shapes on {_named(rows)} than on rank 0. "
            "Build and compile the same model on every rank."
        )


def check_values(workers: Workers, variables: Sequence[keras.Variable], cure: str) -> None:
    """Checks that variables have the same values on all workers.

    Args:
        workers: Several; copies on one worker's devices are not compared.
        variables: As many on every worker.
        cure: What to do if not.

    Raises:
        ClusterError: They have not.
    """
    rows = _digests(workers, variables)
    if _ranks_apart(rows):
        unequal = np.flatnonzero((rows != rows[0]).any(0))
        raise ClusterError(
            f"{len(unequal)} of {len(variables)} variables are not the same on all ranks, the "
            f"first is {variables[unequal[0]].path!r} on {_named(rows)}: {cure}"
        )


def are_same(workers: Workers, variables: Sequence[keras.Variable]) -> bool:
    """Tells whether variables, as many on every worker, have the same values on all of them."""
    return not _ranks_apart(_digests(workers, variables))


def _digests(workers: Workers, variables: Sequence[keras.Variable]) -> np.ndarray:
    """A number for each variable, one row a worker; for those that no worker has whole, 0."""
    return workers.gather(
        [0.0 if is_elsewhere(v) else _digest(np.asarray(v.value).tobytes()) for v in variables]
    )


def _digest(data: bytes) -> float:
    """A number that tells data apart; 48 bits, which a float64 holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big"))


def _ranks_apart(rows: np.ndarray) -> list[int]:
    """The ranks whose row is not that of rank 0."""
    return [int(rank) for rank in np.flatnonzero((rows != rows[0]).any(1))]


def _named(rows: np.ndarray) -> str:
    ranks = _ranks_apart(rows)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
