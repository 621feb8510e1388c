"""Ensures that all workers have the same counts, seeds, variables, and results of rank 0."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError, ConfigurationError, TfdistError
from tfdist.groups.base import ProcessGroup
from tfdist.groups.fusion import FUSION_LIMIT, fused
from tfdist.upstream.keras_variables import is_elsewhere, values_of
from tfdist.upstream.tensorflow_runtime import seed_of_process


def check_same_count(group: ProcessGroup, number: int, what: str, option: str) -> None:
    """Checks that a number is the same on all workers.

    Each of n workers receives n numbers.

    Raises:
        ConfigurationError: The numbers differ.
    """
    counts = group.gather([number])[:, 0].astype(int)
    if counts.min() < counts.max():
        raise ConfigurationError(
            f"The workers have {', '.join(map(str, counts))} {what}, by rank: "
            f"expected the same number on each. Set it with {option}."
        )


def synchronize_seed(group: ProcessGroup) -> None:
    """Sets the same random seed on all workers, unless one of them has set a seed.

    Shuffling and initial weights must be the same on all workers.
    Each of n workers receives n pairs of numbers.
    """
    # Not from Keras's or Python's generators, which may be seeded.
    seed = random.SystemRandom().randrange(2**31)
    gathered = group.gather([seed_of_process() is not None, seed])
    if not gathered[:, 0].any():
        keras.utils.set_random_seed(int(gathered[0, 1]))


def from_rank0(group: ProcessGroup, make: Callable[[], str]) -> str:
    """Calls `make` on rank 0 and returns its text on every worker.

    Each of n workers receives the text once, and n numbers.

    Raises:
        TfdistError: `make` raised it. Other ranks raise an error of the same type and message.
    """
    error, text = None, ""
    if group.rank == 0:
        try:
            text = make()
        except TfdistError as raised:
            error = raised
    received, failed = group.broadcast_object((text, error and (type(error), str(error))))
    if error is not None:
        raise error
    if failed is not None:
        kind, message = failed
        try:
            error = kind(message)
        except TypeError:  # the type needs more arguments
            error = TfdistError(message)
        raise error
    return received


# ---- variables ----


def broadcast_and_check(
    group: ProcessGroup, variables: Sequence[keras.Variable], root: int = 0
) -> None:
    """Broadcasts variables from rank `root`, and verifies that all ranks have the same values.

    Variables of which each worker has only a shard are skipped.
    Each of n workers receives the values once, and n triples of numbers.

    Raises:
        ClusterError: The workers have different models, or the values differ after the broadcast.
    """
    check_shapes(group, variables)
    variables = [v for v in variables if not is_elsewhere(v)]
    broadcast(group, [value for v in variables for value in values_of(v)], root)
    check_values(group, variables, "the broadcast failed; run tfdist doctor.")


def broadcast(group: ProcessGroup, variables: Sequence[tf.Variable], root: int = 0) -> None:
    """Broadcasts variables from rank `root`.

    Small variables are fused into one message. Large ones are sent one by one, so that there is
    never a second copy of the whole model in memory.
    Each worker receives the values once, whatever the number of workers is.
    """

    def sent(tensors: list) -> list:
        return [group.broadcast_tensor(tensor, root) for tensor in tensors]

    movable = [v for v in variables if v.dtype != tf.string]
    small = [v for v in movable if v.shape.num_elements() < FUSION_LIMIT]
    for variable, value in zip(small, fused(sent, [v.read_value() for v in small]), strict=True):
        variable.assign(value)
    for variable in movable:
        if variable.shape.num_elements() >= FUSION_LIMIT:
            variable.assign(group.broadcast_tensor(variable.read_value(), root))


def check_shapes(group: ProcessGroup, variables: Sequence[keras.Variable | tf.TensorSpec]) -> None:
    """Checks that all workers have variables of the same number, shapes and dtypes.

    Each of n workers receives n pairs of numbers.

    Raises:
        ClusterError: They differ, so that collectives would fail or hang.
    """
    layout = [(tuple(v.shape), str(v.dtype)) for v in variables]
    rows = group.gather([len(layout), digest(repr(layout).encode())])
    if ranks := _different_ranks(rows):
        raise ClusterError(
            f"The ranks built different models: {', '.join(f'{n:.0f}' for n in rows[:, 0])} "
            f"variables by rank, and shapes on {names_of(ranks)} differ from rank 0. "
            "Build and compile the same model on every rank."
        )


def check_values(group: ProcessGroup, variables: Sequence[keras.Variable], fix: str) -> None:
    """Checks that variables have the same values on all workers.

    Each of n workers receives n numbers, and n numbers per variable if there is a difference.

    Args:
        group: The workers. Copies on several devices of a worker are not compared.
        variables: The same number of variables on every worker.
        fix: What to do if the values differ, for the message.

    Raises:
        ClusterError: The values differ.
    """
    digests = _digests(variables)
    if _digests_are_same(group, digests):
        return
    rows = group.gather(digests)
    unequal = np.flatnonzero((rows != rows[0]).any(0))
    raise ClusterError(
        f"{len(unequal)} of {len(variables)} variables differ between ranks. The "
        f"first one is {variables[unequal[0]].path!r} on {names_of(_different_ranks(rows))}: {fix}"
    )


def are_same(group: ProcessGroup, variables: Sequence[keras.Variable]) -> bool:
    """Returns whether variables have the same values on all workers.

    Each of n workers receives n numbers.
    """
    return _digests_are_same(group, _digests(variables))


def _digests(variables: Sequence[keras.Variable]) -> list[float]:
    """Returns a number per variable; 0 for variables of which each worker has only a shard."""
    return [0.0 if is_elsewhere(v) else digest(np.asarray(v.value).tobytes()) for v in variables]


def _digests_are_same(group: ProcessGroup, digests: Sequence[float]) -> bool:
    rows = group.gather([digest(np.asarray(digests).tobytes())])
    return not _different_ranks(rows)


def digest(data: bytes) -> float:
    """Returns a hash of 48 bits, which a float64 holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big"))


def _different_ranks(rows: np.ndarray) -> list[int]:
    return [int(rank) for rank in np.flatnonzero((rows != rows[0]).any(1))]


def names_of(ranks: Sequence[int]) -> str:
    """Returns ranks in words: `rank 1`, `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
