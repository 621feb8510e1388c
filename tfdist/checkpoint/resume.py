"""Chooses the checkpoint to resume from. The chief chooses it and sends it to all workers."""

from __future__ import annotations

import itertools
import json
import os
import posixpath
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.checkpoint.locations import store_at
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.snapshot import Packed, Snapshot
from tfdist.checkpoint.store import Place, Store, load
from tfdist.errors import ConfigurationError
from tfdist.groups.agreement import from_rank0
from tfdist.strategies.base import Strategy


def choose(
    settings: Checkpoints, store: Store, strategy: Strategy, say: Callable[[str], None]
) -> tuple[str, Snapshot] | None:
    """Returns the path of a checkpoint and its content, on every worker.

    Args:
        settings: Which checkpoint to resume from.
        store: The checkpoints of this run.
        strategy: The strategy of this run.
        say: Called on the chief with a line for each damaged checkpoint.

    Returns:
        None if training starts from the beginning.

    Raises:
        ConfigurationError: The checkpoint does not exist, is damaged or cannot be read, or the
            folder would mix checkpoints of two runs.
    """
    packed = Packed("", {})

    def choose_on_chief() -> str:
        nonlocal packed
        found = _load(settings, store, say)
        if found is None:
            return ""
        path, packed = found
        return json.dumps([path, packed.text])

    if not (sent := from_rank0(strategy.group, choose_on_chief)):
        return None
    path, text = json.loads(sent)
    arrays = packed.arrays
    if strategy.num_workers > 1:  # state of a process, such as an iterator's, cannot be broadcast
        arrays = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}
    return path, Snapshot.unpacked(Packed(text, strategy.group.broadcast_arrays(arrays)), path)


def _load(
    settings: Checkpoints, store: Store, say: Callable[[str], None]
) -> tuple[str, Packed] | None:
    """Reads the checkpoint to resume from; removes the files of interrupted saves."""
    if settings.resume == "auto":
        store.clean()
        found = store.load_newest(say)
        if found is not None:
            path, _ = found
            newer = itertools.takewhile(lambda place: store.path(place) != path, store.places())
            _set_aside(store, list(newer), say)
        return found
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
        if found := store_at(folder).load_newest(say):
            break
    else:
        found = path, load(path)
    path, packed = found
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
