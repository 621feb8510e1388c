"""Saves checkpoints during training, and resumes from them.

Between two steps, all workers have the same state and have used the same batches. Therefore only
the chief writes checkpoints, and when training resumes, it reads the checkpoint and broadcasts it.
"""

from __future__ import annotations

import posixpath
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint import resume
from tfdist.checkpoint.locations import store_at
from tfdist.checkpoint.lock import lock_of
from tfdist.checkpoint.manifest import versions
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.snapshot import Snapshot
from tfdist.checkpoint.store import BackgroundWriter, Place, Store
from tfdist.errors import ConfigurationError
from tfdist.groups.agreement import from_rank0
from tfdist.loops.epoch import Call
from tfdist.loops.keras_loops import CheckpointHooks
from tfdist.loops.training_state import Progress, TrainingState
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs
from tfdist.upstream import keras_training


class Checkpointing(CheckpointHooks):
    """The checkpoints of one `fit`.

    Args:
        settings: Where and how often to save.
        model: The model.
        strategy: Sends a checkpoint to all workers.
        state: Captures and restores the state.
    """

    def __init__(
        self,
        settings: Checkpoints,
        model: keras.Model,
        strategy: Strategy,
        state: TrainingState,
    ) -> None:
        super().__init__()
        self._settings, self._model, self._strategy = settings, model, strategy
        self._state, self._store = state, store_at(settings.folder, settings.before_upload)
        self._lock = lock_of(settings.folder)
        self._writing = CheckpointWriter(settings, self._store, strategy)
        self._saved_at = time.monotonic()
        # The checkpoint to resume from, until its state is completely restored.
        self._saved: Snapshot | None = None
        self._path = ""

    def begin(self, callbacks: Sequence[keras.callbacks.Callback], epochs: int) -> bool:
        self._state.callbacks, self._epochs = callbacks, epochs
        from_rank0(self._strategy.group, self._acquire_lock)
        found = resume.choose(self._settings, self._store, self._strategy, say)
        if found is None:
            return False
        self._path, self._saved = found
        self.progress = Progress(**self._saved.state["progress"])
        self._restore(self._saved)
        self._state.before_training(self._saved)
        if self._strategy.is_chief:
            self._report()
        return True

    def after_train_begin(self) -> None:
        if (saved := self._saved) is None:
            return
        self._restore(saved)
        self._state.restore_callbacks(saved)
        self._state.restore_data(saved)
        if not self.progress.step:
            self._saved = None

    def after_epoch_begin(self) -> tuple[int, Logs]:
        if (saved := self._saved) is None:
            return 0, {}
        # Restored again, because callbacks may have changed the state in `on_epoch_begin`.
        self._restore(saved)
        self._state.restore_callbacks(saved)
        self._saved = None
        return self.progress.step, self.progress.logs

    def max_steps(self) -> int | None:
        every = self._settings.steps
        return None if every is None else every - self.progress.total % every

    def end_call(self, call: Call) -> None:
        progress = self.progress
        self._advance(call)
        every, seconds = self._settings.steps, self._settings.seconds
        is_step = every is not None and progress.total % every == 0
        is_time = seconds is not None and time.monotonic() - self._saved_at >= seconds
        if is_step:
            self.before_save()
        # The clocks of workers differ.
        if is_step or (is_time and not self._state.has_pending() and self.may_save()):
            self._save()

    def interrupted(self) -> None:
        self._save()
        self.close()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # An interrupted evaluation starts again from its beginning.
        job = self._job()
        try:
            yield
        except KeyboardInterrupt:
            self._writing.submit(job)
            self.close()
            raise

    def end_epoch(self, logs: Logs) -> None:
        progress = self.progress
        progress.step, progress.logs = 0, dict(logs)
        is_last = progress.stopped or progress.epoch >= self._epochs
        if self._is_best(logs) or is_last or self._settings.at_epochs:
            self._save()

    def close(self) -> None:
        try:
            self._writing.finish()
        finally:
            self._lock.release()

    def save_aside(self, name: str, call: Call) -> str:
        self._advance(call)
        store = store_at(posixpath.join(self._store.folder, name))
        path = store.path(self.progress.place)
        snapshot = self._state.take(self.progress)
        if snapshot is not None:
            self._writing.submit(None)  # waits for the thread, which writes to the same disk
            facts = self._writing.facts(self.progress, self._epochs)
            store.write(self.progress.place, snapshot.packed(), facts)
            store.finish()
        return path

    def _advance(self, call: Call) -> None:
        progress = self.progress
        progress.total += call.last_step + 1 - progress.step
        progress.step, progress.logs = call.last_step + 1, dict(call.logs)

    def _acquire_lock(self) -> str:
        self._lock.acquire()
        return ""

    def _restore(self, saved: Snapshot) -> None:
        self._state.restore_variables(saved, self._path, within_epoch=self.progress.step > 0)

    def _report(self) -> None:
        done = self.progress
        if done.stopped or done.epoch >= self._epochs:
            say(f"Training is already complete after epoch {done.epoch}: {self._path}.")
        else:
            within = f" and {done.step} steps" if done.step else ""
            say(f"Resuming after {done.epoch} epochs{within} (step {done.total}): {self._path}.")

    def _is_best(self, logs: Logs) -> bool:
        """Returns whether an epoch is the best so far, and records it if so."""
        monitor, best = self._settings.keep_best, self.progress.best
        name = (monitor or "").rpartition(":")[2]
        if monitor is None or name not in logs:  # an epoch without validation
            return False
        value = float(logs[name])
        if best and not keras_training.is_better(self._model, monitor, value, best["value"]):
            return False
        self.progress.best = {"value": value, "place": list(self.progress.place)}
        return True

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        self._lock.check()
        self._writing.submit(self._job())

    def _job(self) -> Callable[[], None] | None:
        """Returns a function that writes a copy of the current state, or None on other workers."""
        if (snapshot := self._state.take(self.progress)) is None:
            return None
        return self._writing.job(snapshot, self.progress, self._epochs)


#: The name of the failed TensorFlow operation at the beginning of its error message.
_NODE = re.compile(r"^\{\{.*?\}\} ")


class CheckpointWriter:
    """Writes checkpoints in a background thread, one at a time.

    Args:
        settings: Which checkpoints to keep, and whether a failed write stops the run.
        store: Where to write.
        strategy: The strategy, which is described in the manifest.
    """

    def __init__(self, settings: Checkpoints, store: Store, strategy: Strategy) -> None:
        self._settings, self._store, self._strategy = settings, store, strategy
        self._writer = BackgroundWriter()

    def job(self, snapshot: Snapshot, progress: Progress, epochs: int) -> Callable[[], None]:
        """Returns a function that writes a checkpoint.

        Args:
            snapshot: The state.
            progress: The progress of the run at that point.
            epochs: Total number of epochs.
        """
        packed, place, facts = snapshot.packed(), progress.place, self.facts(progress, epochs)
        best = Place(*progress.best["place"]) if progress.best else None

        def write() -> None:
            self._store.write(place, packed, facts)
            self._store.keep(self._settings.keep, best)

        return write

    def submit(self, job: Callable[[], None] | None) -> None:
        """Starts a write in the background thread, and reports the result of the previous one.

        Raises:
            ConfigurationError: The previous write failed, and `on_error` is `"stop"`.
        """
        try:
            self._writer.wait()
        except (OSError, tf.errors.OpError) as error:
            reason = _NODE.sub("", str(error).splitlines()[0])
            line = f"Could not write a checkpoint to {self._settings.folder}: {reason}"
            if self._settings.on_error == "stop":
                raise ConfigurationError(f"{line}. Earlier checkpoints are intact.") from error
            say(f"{line}. Training continues; earlier checkpoints are intact.")
        if job is not None:
            self._writer.submit(job)

    def finish(self) -> None:
        """Waits for the write in progress, and for its upload.

        Raises:
            ConfigurationError: The last checkpoint could not be uploaded.
        """
        try:
            self.submit(None)
        finally:
            self._store.finish()

    def facts(self, progress: Progress, epochs: int) -> dict[str, Any]:
        """Returns the manifest of a checkpoint."""
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
