"""Saves checkpoints during training, and resumes from them.

Between two steps, all workers have the same state and have used the same batches. Therefore only
the chief writes checkpoints, unless each worker has only its shards of some variables. When
training resumes, the chief reads the checkpoint and broadcasts it, without shards of workers.
"""

from __future__ import annotations

import functools
import posixpath
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np

from tfdist.checkpoint import resume
from tfdist.checkpoint.locations import store_at
from tfdist.checkpoint.lock import lock_of
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.snapshot import Snapshot
from tfdist.groups.agreement import from_rank0
from tfdist.loops import interrupts
from tfdist.loops.checkpoint_writer import CheckpointWriter, Job, say
from tfdist.loops.epoch import Call
from tfdist.loops.fit import CheckpointHooks
from tfdist.loops.training_state import Progress, TrainingState
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult
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
        own = self._state.own_shards()
        found = resume.choose(self._settings, self._store, self._strategy, say, own)
        if self._state.is_divided():
            self._writing.write_jointly()
        if found is None:
            return False
        self._path, self._saved = found
        interrupts.note_checkpoint()
        self.progress = Progress(**self._saved.state["progress"])
        self._restore(self._saved)
        self._state.before_training(self._saved)
        if self._strategy.group.is_chief:
            self._report()
        return True

    def after_train_begin(self) -> None:
        if (saved := self._saved) is None:
            return
        self._restore(saved)
        self._state.restore_callbacks(saved)
        restore_data = functools.partial(self._state.restore_data, saved.state["data"])
        if self._is_complete():
            self.skip_used_data = restore_data
        else:
            restore_data()
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
        every = self._settings.steps
        if every is not None and progress.total % every == 0:
            self.before_save()
            self._save()

    def columns(self, result: LoopResult) -> list[float]:
        seconds = self._settings.seconds
        return [seconds is not None and time.monotonic() - self._saved_at >= seconds]

    def compare(self, rows: np.ndarray) -> None:
        # The clocks of workers differ; that of rank 0 decides.
        if rows[0, 0] and not self._state.has_pending() and self.may_save():
            self._save()

    def interrupted(self) -> None:
        self._save(is_last=True)
        self.close()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # An interrupted evaluation starts again from its beginning.
        job = self._job()
        try:
            yield
        except KeyboardInterrupt:
            self._writing.submit(job, is_last=True)
            self.close()
            raise

    def end_epoch(self, logs: Logs) -> None:
        progress = self.progress
        progress.step, progress.logs = 0, dict(logs)
        is_last = self._is_complete()
        if self._is_best(logs) or is_last or self._settings.at_epochs:
            self._save(is_last)

    def close(self) -> None:
        try:
            self._writing.finish()
        finally:
            self._lock.release()

    def save_aside(self, name: str, call: Call) -> str:
        self._advance(call)
        store = store_at(posixpath.join(self._store.folder, name))
        path = store.path(self.progress.place)
        self._writing.submit(None)  # waits for the thread, which writes to the same disk
        snapshot = self._state.take(self.progress)
        if snapshot is not None:
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

    def _is_complete(self) -> bool:
        return self.progress.stopped or self.progress.epoch >= self._epochs

    def _report(self) -> None:
        done = self.progress
        if self._is_complete():
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

    def _save(self, is_last: bool = False) -> None:
        self._saved_at = time.monotonic()
        self._lock.check()
        self._writing.submit(self._job(), is_last)

    def _job(self) -> Job | None:
        """Returns a copy of the current state to write, or None on workers that write nothing."""
        snapshot = self._state.take(self.progress, self._writing.is_joint)
        if snapshot is None:
            return None
        return self._writing.job(snapshot, self.progress, self._epochs)
