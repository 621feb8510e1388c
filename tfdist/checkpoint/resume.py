"""Chooses the checkpoint to resume from.

The chief chooses it and sends it to all workers, except for shards, which each worker reads itself.
"""

from __future__ import annotations

import itertools
import json
import os
import posixpath
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.snapshot import (
    NO_SHARDS,
    OwnShards,
    Packed,
    Shard,
    Snapshot,
    prefix_in,
    slice_specs,
)
from tfdist.checkpoint.store import Place, Store, load, store_at, verified_files
from tfdist.errors import ConfigurationError
from tfdist.groups.agreement import from_rank0
from tfdist.strategies.base import Strategy


def choose(
    settings: Checkpoints,
    store: Store,
    strategy: Strategy,
    say: Callable[[str], None],
    own: OwnShards = NO_SHARDS,
) -> tuple[str, Snapshot] | None:
    """Returns the path of a checkpoint and its content, on every worker.

    Args:
        settings: Which checkpoint to resume from.
        store: The checkpoints of this run.
        strategy: The strategy of this run.
        say: Called on the chief with a line for each damaged checkpoint.
        own: The shards of this worker, of the same variables on every worker. They are in
            `Snapshot.shards`, unless a worker cannot read its own: then the chief reads all.

    Returns:
        None if training starts from the beginning.

    Raises:
        ConfigurationError: The checkpoint does not exist, is damaged or cannot be read, or the
            folder would mix checkpoints of two runs.
    """
    chosen = _choose(settings, store, strategy, say, own)
    if chosen is None or not own.shards:
        return chosen
    path, snapshot = chosen
    failed = False
    try:
        snapshot.shards = read_shards(path, own)
    except (ConfigurationError, OSError, tf.errors.OpError, ValueError):
        failed = True  # damaged, of another model, or not in a shared folder: the chief finds out
    if not strategy.group.gather([failed]).any():
        return chosen
    return _choose(settings, store, strategy, say, NO_SHARDS)


def read_shards(path: str, own: OwnShards) -> list[Shard]:
    """Reads shards from a checkpoint that any number of ranks has written.

    Args:
        path: A folder that this worker can read, or a URL.
        own: The shards.

    Raises:
        DamagedError: A file is damaged.
        UnreadableError: A file cannot be read.
        ValueError, tf.errors.OpError: The checkpoint does not have such variables.
    """
    with verified_files(path, own.needed) as folder, tf.device("CPU:0"):
        prefix = prefix_in(folder)
        reader = tf.train.load_checkpoint(prefix)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        shards = []
        for name, (shape, begin, end) in own.shards.items():
            if tuple(shapes.get(name, ())) != shape:
                raise ValueError(f"{path} has no variable {name} with shape {shape}")
            specs = [spec for spec, _ in slice_specs(shape, begin, end)]
            slices = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=[name] * len(specs),
                shape_and_slices=specs,
                dtypes=[dtypes[name]] * len(specs),
            )
            values = tf.concat([tf.reshape(one, [-1]) for one in slices], 0)
            shards.append(Shard(name, shape, begin, values))
        return shards


def _choose(
    settings: Checkpoints,
    store: Store,
    strategy: Strategy,
    say: Callable[[str], None],
    own: OwnShards,
) -> tuple[str, Snapshot] | None:
    """Returns what the chief has chosen and read, without the shards."""
    packed = Packed("", {})

    def choose_on_chief() -> str:
        nonlocal packed
        loaded = _load(settings, store, say, own)
        if loaded is None:
            return ""
        path, packed = loaded
        return json.dumps([path, packed.text])

    if not (sent := from_rank0(strategy.group, choose_on_chief)):
        return None
    path, text = json.loads(sent)
    arrays = packed.arrays
    if strategy.group.size > 1:  # state of a process, such as an iterator's, cannot be broadcast
        arrays = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}
        arrays = strategy.group.broadcast_object(arrays)
    packed = Packed(text, arrays)
    return path, Snapshot.unpacked(packed, path, own.shards)


def _load(
    settings: Checkpoints, store: Store, say: Callable[[str], None], own: OwnShards
) -> tuple[str, Packed] | None:
    """Reads the checkpoint to resume from; removes the files of interrupted saves."""
    if settings.resume == "auto":
        store.clean()
        loaded = store.load_newest(say, own)
        if loaded is not None:
            path, _ = loaded
            newer = itertools.takewhile(lambda place: store.path(place) != path, store.places())
            _set_aside(store, list(newer), say)
        return loaded
    if settings.resume == "never":
        if store.all_damaged():
            _set_aside(store, store.places(), say)
        if places := store.places():
            raise ConfigurationError(
                f"{store.folder} already has checkpoints, up to step {places[0].step}. Resume from "
                "them with resume='auto' (--resume auto), or use another folder."
            )
        return None
    path = os.fspath(settings.resume).rstrip("/")
    for folder in (path, posixpath.join(path, "checkpoints")):  # in a run folder
        if loaded := store_at(folder).load_newest(say, own):
            break
    else:
        loaded = path, load(path, own)
    path, packed = loaded
    places = store.places()
    later = [place for place in places if posixpath.basename(path) < place.name]
    if later or (places and posixpath.dirname(path) != store.folder):
        raise ConfigurationError(
            f"{store.folder} has checkpoints up to step {places[0].step} that do not belong to "
            f"{path}. Resume from them with resume='auto' (--resume auto), or use another folder."
        )
    return path, packed


def _set_aside(store: Store, damaged: Sequence[Place], say: Callable[[str], None]) -> None:
    """Renames damaged checkpoints, because they would count towards the number to keep."""
    if damaged:
        renamed = store.set_aside(damaged)
        say(f"Damaged checkpoints in {store.folder} were renamed: {', '.join(renamed)}.")
