"""The variables of a run in a canonical form that does not depend on the strategy.

Variables are named by owner and position, because the numbers in Keras's names depend on all models
that the process has built. A checkpoint contains the model's plain variables, once; it does not
contain the replicas' mirrored variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint.snapshot import OwnShards, Shard, ShardRange, Snapshot
from tfdist.errors import ConfigurationError
from tfdist.groups.base import ProcessGroup
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model
from tfdist.upstream.keras_layers import frozen_weights
from tfdist.upstream.keras_variables import is_divided_over_processes, values_of

#: Variables by owner: `model`, `optimizer 1`, `metrics`, ...
Groups = Mapping[str, Sequence[keras.Variable]]

#: Gradient sums by replica and by variable.
GradientSums = Sequence[Sequence[np.ndarray]]

#: The owner of the model's variables.
MODEL = "model"

#: The key of the checksums of the frozen weights that a checkpoint leaves out.
FROZEN = "frozen"
_MOD = 1 << 40  # sums over many processes are exact in float64
_WORDS = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}

#: Owners whose variables must all match. If they do not, the checkpoint is from another model.
_REQUIRED = (MODEL, "optimizer")

# The name is part of the file format.
_GLOBAL_SEED = "seed of what draws without one"


def named_frozen(groups: Groups, model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the frozen weights of a model, by their names in checkpoints."""
    frozen = set(map(id, frozen_weights(model)))
    return {name: v for name, v in _named(groups).items() if id(v) in frozen}


def checksums(
    frozen: Mapping[str, keras.Variable], group: ProcessGroup | None = None
) -> dict[str, int]:
    """Returns the sum of the bits of each variable, the same however it is sharded.

    Args:
        frozen: Variables by name.
        group: The processes, if all of them call this function; otherwise variables are gathered.
    """
    sums, everywhere = dict[str, int](), group is None or group.is_chief
    for name, variable in frozen.items():
        is_divided = is_divided_over_processes(variable)
        tensors = values_of(variable) if group is not None else [variable.value]
        tensors = tensors if is_divided or everywhere else []
        sums[name] = sum(map(_sum_of_bits, tensors))
    if group is None or not sums:
        return sums
    rows = group.gather([*sums.values()])
    return {name: int(n) % _MOD for name, n in zip(sums, rows.sum(0), strict=True)}


def _sum_of_bits(tensor: Any) -> int:
    words = tf.bitcast(tensor, _WORDS[tf.as_dtype(tensor.dtype).size])
    return int(tf.reduce_sum(tf.cast(words, tf.int64))) % _MOD


def check_frozen(sums: Mapping[str, int], snapshot: Snapshot, path: str) -> None:
    """Checks that a run has the frozen weights that a checkpoint does not contain.

    Raises:
        ConfigurationError: Some differ.
    """
    for name, number in snapshot.state.get(FROZEN, {}).items():
        if sums.get(name) != number:
            raise ConfigurationError(
                f"{path} has no frozen weights, and {name!r} of this model differs from the one "
                "that the run started with. Load the same weights before you resume."
            )


def capture(groups: Groups, snapshot: Snapshot) -> None:
    """Adds the current values of variables to a snapshot, except for those of `state[FROZEN]`.

    Values on the host are not copied: TensorFlow copies a variable on write while its previous
    value is still referenced.
    """
    with tf.device("CPU:0"):
        for name, variable in _saved_of(groups, snapshot).items():
            snapshot.variables[name] = tf.identity(variable.value)
            snapshot.paths[name] = variable.path


def capture_parts(groups: Groups, snapshot: Snapshot, is_chief: bool) -> None:
    """Adds this process's shards to a snapshot, and on the chief the variables without shards.

    No values are exchanged between processes.
    """
    with tf.device("CPU:0"):
        for name, variable in _saved_of(groups, snapshot).items():
            if is_divided_over_processes(variable):
                (part,), begin = variable.parts, variable.division.begin
                shape = tuple(variable.shape)
                snapshot.shards.append(Shard(name, shape, begin, tf.identity(part)))
            elif is_chief:
                snapshot.variables[name] = tf.identity(variable.value)
            snapshot.paths[name] = variable.path


def own_shards(groups: Groups) -> OwnShards:
    """Returns the shards of this process, without those of variables that it also has whole."""
    divided = {n: v for n, v in _named(groups).items() if is_divided_over_processes(v)}
    shards = {}
    for name, variable in divided.items():
        if not variable.is_whole:
            begin, num = variable.division.begin, variable.parts[0].shape.num_elements()
            shards[name] = ShardRange(tuple(variable.shape), begin, begin + num)
    return OwnShards(shards, has_copies=len(shards) < len(divided))


def are_divided(groups: Groups) -> bool:
    """Returns whether some variables are sharded over processes."""
    return any(is_divided_over_processes(v) for variables in groups.values() for v in variables)


def restore(groups: Groups, snapshot: Snapshot, path: str, within_epoch: bool) -> None:
    """Assigns the values of a snapshot to variables.

    Args:
        groups: The variables of the model as it is now.
        snapshot: From a run with the same model.
        path: The path of the checkpoint, for messages.
        within_epoch: Whether training resumes within an epoch, so that metrics must match too.

    Raises:
        ConfigurationError: The snapshot is from another model.
    """
    if any(name.startswith(_GLOBAL_SEED) for name in snapshot.variables):
        keras_model.ensured_global_generator()
    named, saved = _saved_of(groups, snapshot), _saved(snapshot)
    for name, variable in named.items():
        fits = _fits(saved.get(name), variable)
        is_same = fits and _unnumbered(snapshot.paths[name]) == _unnumbered(variable.path)
        if not is_same and (within_epoch or name.startswith(_REQUIRED)):
            raise ConfigurationError(_mismatch(path, name, variable, snapshot))
    if missing := [n for n in saved if n.startswith(_REQUIRED) and n not in named]:
        raise ConfigurationError(
            f"{path} is from another model: it has {snapshot.paths[missing[0]]!r}, which this "
            "model does not have. Build the same model, or use another folder for its checkpoints."
        )
    for name, variable in named.items():
        value = saved.get(name)
        if isinstance(value, Shard) and _fits(value, variable):
            variable.parts[0].assign(value.values)
        elif _fits(value, variable):
            variable.assign(value)


def capture_gradient_sums(
    strategy: Strategy, sums: Sequence[Sequence[tf.Variable]]
) -> list[list[np.ndarray]]:
    """Returns the gradients accumulated so far (`gradient_accumulation_steps`), of all replicas.

    In one process, each replica's sums are saved, so that a run that resumes with the same number
    of replicas sums the same values in the same order. With several workers, only the total over
    all replicas is saved. All workers must call this function together.
    """
    values = [[variable.numpy() for variable in replica_sums] for replica_sums in sums]
    return values if strategy.group.size == 1 else [strategy.group.sum_arrays(_total(values))]


def restore_gradient_sums(
    strategy: Strategy, sums: Sequence[Sequence[tf.Variable]], saved: GradientSums
) -> None:
    """Assigns accumulated gradients to the replicas of this worker.

    With several workers, or if the number of replicas has changed, the first replica gets the
    total, and the others get zeros.

    Args:
        strategy: The strategy of this run.
        sums: The accumulation variables of this worker's replicas.
        saved: The gradients of all replicas when the checkpoint was saved.
    """
    if strategy.group.size > 1 or len(saved) != len(sums):
        total = _total(saved)
        zeros = [np.zeros_like(value) for value in total]
        first = zeros if strategy.group.rank else total
        saved = [first, *[zeros] * (len(sums) - 1)]
    for replica_sums, values in zip(sums, saved, strict=True):
        for variable, value in zip(replica_sums, values, strict=True):
            variable.assign(value)


def _total(sums: GradientSums) -> list[np.ndarray]:
    return [np.sum(values, axis=0, dtype=values[0].dtype) for values in zip(*sums, strict=True)]


def _fits(saved: Any, variable: keras.Variable) -> bool:
    if saved is None or tuple(saved.shape) != tuple(variable.shape):
        return False
    return tf.as_dtype(saved.dtype).name == variable.dtype


def _saved_of(groups: Groups, snapshot: Snapshot) -> dict[str, keras.Variable]:
    frozen = snapshot.state.get(FROZEN, {})
    return {name: v for name, v in _named(groups).items() if name not in frozen}


def _saved(snapshot: Snapshot) -> dict[str, Any]:
    return {**snapshot.variables, **{shard.name: shard for shard in snapshot.shards}}


def _mismatch(path: str, name: str, variable: keras.Variable, snapshot: Snapshot) -> str:
    saved = _saved(snapshot).get(name)
    saved_as = "no variable"
    if saved is not None:
        saved_as = f"{snapshot.paths[name]!r} ({tuple(saved.shape)}, {saved.dtype})"
    return (
        f"{path} is from another model: expected {variable.path!r} ({tuple(variable.shape)}, "
        f"{variable.dtype}), found {saved_as}. Build the same model, or use another folder for its "
        "checkpoints."
    )


def _named(groups: Groups) -> dict[str, keras.Variable]:
    generator = keras_model.global_generator()
    of_process = {} if generator is None else {_GLOBAL_SEED: [generator.state]}
    return {
        f"{group}/{number:05d}": variable
        for group, variables in {**groups, **of_process}.items()
        for number, variable in enumerate(variables)
    }


def _unnumbered(path: str) -> str:
    """Returns a path without the numbers that Keras appends to repeated names."""
    return re.sub(r"_\d+(?=_|/|$)", "", path)
