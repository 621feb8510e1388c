"""Which checkpoint a training goes on from: the chief looks, and all are given what it found."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable

import numpy as np

from tfdist.checkpoint import manifest
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.snapshot import Packed, Snapshot
from tfdist.checkpoint.store import Store
from tfdist.errors import ConfigurationError
from tfdist.strategies.base import Strategy
from tfdist.strategies.collectives.once import once


def choose(
    settings: Checkpoints, store: Store, strategy: Strategy, say: Callable[[str], None]
) -> tuple[str, Snapshot] | None:
    """Returns the path of a checkpoint and what it holds, on every worker; None: there is none.

    Args:
        settings: Say from which to go on.
        store: Of the run's own checkpoints.
        strategy: Of the workers.
        say: Is told of what is damaged, on the chief.

    Raises:
        ConfigurationError: What is to be gone on from is not there, is damaged, or would be
            mixed with another run.
    """
    packed = Packed("", {})

    def look() -> str:
        nonlocal packed
        path = _path(settings, store, say)
        if path is None:
            return ""
        packed = Packed.read(path)
        return json.dumps([path, packed.text])

    if not (told := once(strategy, look)):
        return None
    path, text = json.loads(told)
    arrays = packed.arrays
    if strategy.num_workers > 1:  # of one process: what no other can take
        arrays = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}
    return path, Snapshot.unpacked(Packed(text, strategy.broadcast(arrays)))


def _path(settings: Checkpoints, store: Store, say: Callable[[str], None]) -> str | None:
    """The path of the checkpoint to go on from; clears away what saves have left behind."""
    if settings.resume == "auto":
        store.clean()
        return store.newest_sound(say)
    places = store.places()
    if settings.resume == "never":
        if places:
            raise ConfigurationError(
                f"{store.folder} holds checkpoints already, up to step {places[0].step}: go on "
                "from them with resume='auto', or name another folder."
            )
        return None
    path = os.fspath(settings.resume).rstrip("/")
    for folder in (path, posixpath.join(path, "checkpoints")):  # one of a run's
        if not (others := Store(folder)).places():
            continue
        found = others.newest_sound(say)
        if found is None:
            raise ConfigurationError(f"{path}: none of its checkpoints is whole.")
        path = found
        break
    manifest.verify(path)
    later = [place for place in places if posixpath.basename(path) < place.name]
    if later or (places and posixpath.dirname(path) != store.folder):
        raise ConfigurationError(
            f"{store.folder} holds checkpoints up to step {places[0].step}, which do not come from "
            f"{path}: go on from them with resume='auto', or name another folder."
        )
    return path
