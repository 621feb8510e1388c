"""Writes the checkpoints of a training in a thread, and says what became of each write."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.checkpoint.manifest import versions
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.snapshot import Snapshot
from tfdist.checkpoint.store import BackgroundWriter, Place, Store
from tfdist.errors import ConfigurationError
from tfdist.loops.saving import Progress
from tfdist.strategies.base import Strategy

#: Which of TensorFlow's operations failed, before what became of it.
_NODE = re.compile(r"^\{\{.*?\}\} ")


class CheckpointWriting:
    """One write after another.

    Args:
        settings: Say which checkpoints stay, and what a write that fails does to the training.
        store: Takes them.
        strategy: Of the training, for the manifest.
    """

    def __init__(self, settings: Checkpoints, store: Store, strategy: Strategy) -> None:
        self._settings, self._store, self._strategy = settings, store, strategy
        self._writer = BackgroundWriter()

    def job(self, snapshot: Snapshot, progress: Progress, epochs: int) -> Callable[[], None]:
        """Returns what writes a state.

        Args:
            snapshot: The state.
            progress: Of the training then.
            epochs: After which the training ends.
        """
        packed, place, facts = snapshot.packed(), progress.place, self._facts(progress, epochs)
        best = Place(*progress.best["place"]) if progress.best else None

        def write() -> None:
            self._store.write(place, packed, facts)
            self._store.keep(self._settings.keep, best)

        return write

    def submit(self, job: Callable[[], None] | None) -> None:
        """Has the thread write, and says what became of the write before.

        Raises:
            ConfigurationError: It failed, and the training is to stop then.
        """
        try:
            self._writer.wait()
        except (OSError, tf.errors.OpError) as error:
            reason = _NODE.sub("", str(error).splitlines()[0])
            line = f"A checkpoint could not be written in {self._settings.folder}: {reason}"
            if self._settings.on_error == "stop":
                raise ConfigurationError(f"{line}. Older ones are whole.") from error
            say(f"{line}. The training goes on; older ones are whole.")
        if job is not None:
            self._writer.submit(job)

    def _facts(self, progress: Progress, epochs: int) -> dict[str, Any]:
        """What the manifest says of a checkpoint."""
        strategy = self._strategy
        return {
            "step": progress.total,
            "epoch": progress.epoch,
            "step of epoch": progress.step,
            "ended": progress.stopped or progress.epoch >= epochs,
            "logs": {name: v for name, v in progress.logs.items() if isinstance(v, float)},
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "strategy": strategy.name,
            "replicas": strategy.num_replicas,
            "workers": strategy.num_workers,
            "versions": versions(),
            "configuration": dict(self._settings.configuration),
        }


def say(line: str) -> None:
    """Prints a line on standard error."""
    print(line, file=sys.stderr, flush=True)
