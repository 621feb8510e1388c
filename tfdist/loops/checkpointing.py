"""What a training tells whoever saves it; here nobody does.

Saves a training as it goes, and lets it go on from what was saved.

Between two steps all workers hold the same state, and have had the same batches. So the chief's is
that of all: it alone writes, and where a training goes on, what it reads is given to all.

Writes the checkpoints of a training in a thread, and says what became of each write.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint import resume
from tfdist.checkpoint.lock import FolderLock
from tfdist.checkpoint.manifest import versions
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.snapshot import Snapshot
from tfdist.checkpoint.store import BackgroundWriter, Place, Store
from tfdist.errors import ConfigurationError
from tfdist.groups.agreement import from_rank0
from tfdist.loops.epoch import Call, Observer
from tfdist.loops.training_state import Progress, TrainingState
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs
from tfdist.upstream import keras_callbacks


class CheckpointHooks(Observer):
    """Saves nothing.

    Attributes:
        progress: Of the training.
    """

    def __init__(self) -> None:
        self.progress = Progress()

    def begin(self, callbacks: Sequence[keras.callbacks.Callback], epochs: int) -> bool:
        """Chooses what to go on from, before callbacks hear of anything.

        Args:
            callbacks: Of this worker.
            epochs: To be made in all.

        Returns:
            Whether there is something to go on from; `progress` says how far it is.

        Raises:
            ConfigurationError: It cannot be gone on from, or there must be none.
        """
        del callbacks, epochs
        return False

    def after_train_begin(self) -> None:
        """Undoes what callbacks have forgotten and changed as the training began."""

    def after_epoch_begin(self) -> tuple[int, Logs]:
        """Returns the steps that the epoch which begins has behind it, and the logs after them."""
        return 0, {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns a context for an evaluation, of which nothing is saved."""
        return nullcontext()

    def end_epoch(self, logs: Logs) -> None:
        """Hears of the end of an epoch, when all callbacks have and `progress` says so."""

    def close(self) -> None:
        """Waits until what is under way is written."""


class Checkpointing(CheckpointHooks):
    """The checkpoints of one training.

    Args:
        settings: Say where and how often.
        model: To train.
        strategy: Its workers.
        state: Of the training.
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
        self._state, self._store = state, Store(settings.folder)
        self._lock = FolderLock(settings.folder)
        self._writing = CheckpointWriter(settings, self._store, strategy)
        self._saved_at = time.monotonic()
        # What the training goes on from, until it is as it was then.
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
        self._give(self._saved)
        self._state.before_training(self._saved)
        if self._strategy.is_chief:
            self._tell()
        return True

    def after_train_begin(self) -> None:
        if (saved := self._saved) is None:
            return
        self._give(saved)
        self._state.give_callbacks(saved)
        self._state.give_data(saved)
        if not self.progress.step:
            self._saved = None

    def after_epoch_begin(self) -> tuple[int, Logs]:
        if (saved := self._saved) is None:
            return 0, {}
        # As they were within the epoch, whatever its beginning has done once more.
        self._give(saved)
        self._state.give_callbacks(saved)
        self._saved = None
        return self.progress.step, self.progress.logs

    def most_steps(self) -> int | None:
        every = self._settings.steps
        return None if every is None else every - self.progress.total % every

    def end_call(self, call: Call) -> None:
        progress = self.progress
        progress.total += call.last_step + 1 - progress.step
        progress.step, progress.logs = call.last_step + 1, dict(call.logs)
        every, seconds = self._settings.steps, self._settings.seconds
        is_step = every is not None and progress.total % every == 0
        is_time = seconds is not None and time.monotonic() - self._saved_at >= seconds
        if is_step or (is_time and not self._state.has_waiting()):  # each worker has its own clock
            self._save()

    def interrupted(self) -> None:
        self._save()
        self.close()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # An evaluation that is cut off is to be made anew, from where it began.
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
            self._writing.submit(None)
        finally:
            self._lock.release()

    def _acquire_lock(self) -> str:
        self._lock.acquire()
        return ""

    def _give(self, saved: Snapshot) -> None:
        self._state.give_variables(saved, self._path, within_epoch=self.progress.step > 0)

    def _tell(self) -> None:
        done = self.progress
        if done.stopped or done.epoch >= self._epochs:
            say(f"The training has ended after epoch {done.epoch}: {self._path}.")
        else:
            within = f" and {done.step} steps" if done.step else ""
            say(f"Going on after {done.epoch} epochs{within} (step {done.total}): {self._path}.")

    def _is_best(self, logs: Logs) -> bool:
        """Whether an epoch was the best so far; notes it if so."""
        monitor, best = self._settings.keep_best, self.progress.best
        name = (monitor or "").rpartition(":")[2]
        if monitor is None or name not in logs:  # an epoch without a validation
            return False
        value = float(logs[name])
        if best and not keras_callbacks.is_better(self._model, monitor, value, best["value"]):
            return False
        self.progress.best = {"value": value, "place": list(self.progress.place)}
        return True

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        self._lock.check()
        self._writing.submit(self._job())

    def _job(self) -> Callable[[], None] | None:
        """Takes the state as it is now, and returns what writes it; None: not on this worker."""
        if (snapshot := self._state.take(self.progress)) is None:
            return None
        return self._writing.job(snapshot, self.progress, self._epochs)


#: Which of TensorFlow's operations failed, before what became of it.
_NODE = re.compile(r"^\{\{.*?\}\} ")


class CheckpointWriter:
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
