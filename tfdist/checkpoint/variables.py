"""The variables of a training in one canonical form, whatever the strategy.

Variables are named after their owner and their position, because Keras numbers its own names
through a whole process. The variables of a model are plain ones, on one device; a strategy's
mirrored variables are not saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint.snapshot import Snapshot
from tfdist.errors import ConfigurationError
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model

#: Variables by owner: `model`, `optimizer 1`, `metrics`, ...
Groups = Mapping[str, Sequence[keras.Variable]]

#: Gradient sums by replica and by variable.
GradientSums = Sequence[Sequence[np.ndarray]]

#: The owner of the model's variables.
MODEL = "model"

#: Owners whose variables must all match; otherwise the checkpoint is another model's.
_REQUIRED = (MODEL, "optimizer")

# The name is part of the file format.
_GLOBAL_SEED = "seed of what draws without one"


def take(groups: Groups, snapshot: Snapshot) -> None:
    """Adds the current values of variables to a snapshot.

    Values on the host are not copied here: TensorFlow copies a variable that is written while its
    value is still referenced.
    """
    with tf.device("CPU:0"):
        for name, variable in _named(groups).items():
            snapshot.variables[name] = tf.identity(variable.value)
            snapshot.paths[name] = variable.path


def give(groups: Groups, snapshot: Snapshot, path: str, within_epoch: bool) -> None:
    """Assigns the values of a snapshot to variables.

    Args:
        groups: The variables of the model as it is now.
        snapshot: From a training of the same model.
        path: Where the snapshot was read, for messages.
        within_epoch: Whether the training resumes within an epoch, so that metrics must match too.

    Raises:
        ConfigurationError: The snapshot is of another model.
    """
    if any(name.startswith(_GLOBAL_SEED) for name in snapshot.variables):
        keras_model.ensured_global_generator()
    named = _named(groups)
    for name, variable in named.items():
        fits = _fits(snapshot.variables.get(name), variable)
        is_same = fits and _same_name(snapshot.paths[name], variable.path)
        if not is_same and (within_epoch or name.startswith(_REQUIRED)):
            raise ConfigurationError(_mismatch(path, name, variable, snapshot))
    if missing := [n for n in snapshot.variables if n.startswith(_REQUIRED) and n not in named]:
        raise ConfigurationError(
            f"{path} is of another model: it has {snapshot.paths[missing[0]]!r}, which this model "
            "does not have. Build the same model, or keep its checkpoints in another folder."
        )
    for name, variable in named.items():
        if _fits(snapshot.variables.get(name), variable):
            variable.assign(snapshot.variables[name])


def take_gradient_sums(
    strategy: Strategy, sums: Sequence[Sequence[tf.Variable]]
) -> list[list[np.ndarray]]:
    """Returns the gradients accumulated so far (`gradient_accumulation_steps`), of all replicas.

    In one process the sum of each replica is kept, so that a training that resumes with as many
    replicas adds the same numbers in the same order. Over several workers only their total is kept.
    All workers must call this together.
    """
    values = [[variable.numpy() for variable in own] for own in sums]
    return values if strategy.num_workers == 1 else [strategy.group.sum_arrays(_total(values))]


def give_gradient_sums(
    strategy: Strategy, sums: Sequence[Sequence[tf.Variable]], saved: GradientSums
) -> None:
    """Assigns accumulated gradients to the replicas of this worker.

    Over several workers, or with another number of replicas, the first replica gets the total.

    Args:
        strategy: The strategy of the training.
        sums: The variables of this worker's replicas.
        saved: The gradients of all replicas of the training that was saved.
    """
    if strategy.num_workers > 1 or len(saved) != len(sums):
        total = _total(saved)
        zeros = [np.zeros_like(value) for value in total]
        first = zeros if strategy.rank else total
        saved = [first, *[zeros] * (len(sums) - 1)]
    for own, values in zip(sums, saved, strict=True):
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)


def _total(sums: GradientSums) -> list[np.ndarray]:
    return [np.sum(values, axis=0, dtype=values[0].dtype) for values in zip(*sums, strict=True)]


def _fits(saved: Any, variable: keras.Variable) -> bool:
    if saved is None or tuple(saved.shape) != tuple(variable.shape):
        return False
    return tf.as_dtype(saved.dtype).name == variable.dtype


def _mismatch(path: str, name: str, variable: keras.Variable, snapshot: Snapshot) -> str:
    saved = snapshot.variables.get(name)
    has = "nothing"
    if saved is not None:
        has = f"{snapshot.paths[name]!r} of shape {tuple(saved.shape)}, {saved.dtype}"
    return (
        f"{path} is of another model: for {variable.path!r} of shape {tuple(variable.shape)}, "
        f"{variable.dtype}, it has {has}. Build the same model, or keep its checkpoints in another "
        "folder."
    )


def _named(groups: Groups) -> dict[str, keras.Variable]:
    generator = keras_model.global_generator()
    of_process = {} if generator is None else {_GLOBAL_SEED: [generator.state]}
    return {
        f"{group}/{number:05d}": variable
        for group, variables in {**groups, **of_process}.items()
        for number, variable in enumerate(variables)
    }


def _same_name(one: str, other: str) -> bool:
    """Returns whether paths are equal but for the numbers that Keras appends to equal names."""
    return _unnumbered(one) == _unnumbered(other)


def _unnumbered(path: str) -> str:
    return re.sub(r"_\d+(?=_|/|$)", "", path)
