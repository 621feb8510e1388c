"""Saves checkpoints during training, and resumes from them.

Between two steps, all workers have the same state and have used the same batches. Therefore only
the chief writes checkpoints, unless each worker has only its shards of some variables. When
training resumes, the chief reads the checkpoint and broadcasts it, without shards of workers.
"""

from __future__ import annotations

import functools
import posixpath
import re
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import pipelines
from tfdist.checkpoint import joint_save, resume
from tfdist.checkpoint.joint_save import JointSave, Target, target_at
from tfdist.checkpoint.lock import lock_of
from tfdist.checkpoint.manifest import versions
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.snapshot import Packed, Snapshot
from tfdist.checkpoint.store import BackgroundWriter, Place, Store, store_at
from tfdist.errors import ConfigurationError, first_line
from tfdist.groups.agreement import from_rank0
from tfdist.loops import interrupts
from tfdist.loops.epoch import Call
from tfdist.loops.fit import CheckpointHooks
from tfdist.loops.observers import RunContext
from tfdist.loops.rank_checks import RankChecks
from tfdist.loops.training_state import Progress, TrainingState
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult
from tfdist.upstream import keras_training


class Checkpointing(CheckpointHooks):
    """The checkpoints of one `fit`."""

    def __init__(
        self,
        settings: Checkpoints,
        number: int,
        run: RunContext,
        state: TrainingState,
        rank_checks: RankChecks | None,
    ) -> None:
        super().__init__(number)
        self._settings, self._model, self._strategy = settings, run.model, run.strategy
        self._rank_checks, self._used_data = rank_checks, list[dict[str, Any]]()
        self._state, self._store = state, store_at(settings.folder, settings.before_upload)
        self._lock = lock_of(settings.folder)
        self._writing = CheckpointWriter(settings, self._store, run.strategy)
        self._saved_at = time.monotonic()
        # The checkpoint to resume from, until its state is completely restored.
        self._saved: Snapshot | None = None
        self._path, self._is_best_now = "", False

    def begin(self, epochs: int) -> bool:
        self._epochs = epochs
        from_rank0(self._strategy.group, lambda: self._lock.acquire() or "")
        shards = self._state.own_shards()
        chosen = resume.choose(self._settings, self._store, self._strategy, say, shards)
        if self._state.is_divided():
            self._writing.write_jointly()
        if chosen is None:
            return False
        self._path, self._saved = chosen
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
        if self._is_complete():
            self._used_data = saved.state["data"]
        else:
            self._state.restore_data(saved.state["data"])
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
        self.advance(call)
        every = self._settings.steps
        is_due = every is not None and self.progress.total % every == 0
        is_best, self._is_best_now = self._is_best_now, False
        if is_due or is_best:
            if self._rank_checks:
                self._rank_checks.compare_variables()
            self._save()

    def columns(self, result: LoopResult) -> list[float]:
        seconds = self._settings.seconds
        return [seconds is not None and time.monotonic() - self._saved_at >= seconds]

    def compare(self, rows: np.ndarray) -> None:
        # The clocks of workers differ; that of rank 0 decides.
        checks = self._rank_checks
        is_due = rows[0, 0] and not self._state.has_pending()
        if is_due and (checks is None or checks.have_compared()):
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

    def end_validation(self, logs: Logs) -> None:
        self._is_best_now = self._is_best(logs)  # saved at the end of the call

    def end_epoch(self, logs: Logs) -> None:
        self.progress.logs = dict(logs)
        is_last = self._is_complete()
        if self._is_best(logs) or is_last or self._settings.at_epochs:
            self._save(is_last)

    def skip_used_data(self) -> None:
        if self._used_data:
            self._state.restore_data(self._used_data)

    def after_fit(self) -> CheckpointHooks:
        return self if self._used_data else super().after_fit()

    def close(self) -> None:
        try:
            self._writing.finish()
        finally:
            self._lock.release()

    def save_aside(self, name: str, call: Call) -> str:
        self.advance(call)
        store = store_at(posixpath.join(self._store.folder, name))
        path = store.path(self.progress.place)
        self._writing.submit(None)  # waits for the thread, which writes to the same disk
        snapshot = self._state.take(self.progress)
        if snapshot is not None:
            facts = self._writing.facts(self.progress, self._epochs)
            store.write(self.progress.place, snapshot.packed(), facts)
            store.finish()
        return path

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


#: The name of the failed TensorFlow operation at the beginning of its error message.
_NODE = re.compile(r"^\{\{.*?\}\} ")
_WRITE_ERRORS = (OSError, tf.errors.OpError)
#: Seconds for which rank 0 waits for the parts of the others when the training has failed.
_SECONDS_AFTER_ERROR = 10.0


class Job(NamedTuple):
    """A checkpoint to write.

    Attributes:
        place: Its step and epoch.
        packed: What this worker writes.
        facts: Entries of the manifest.
        best: The best checkpoint so far.
    """

    place: Place
    packed: Packed
    facts: Mapping[str, Any]
    best: Place | None


class CheckpointWriter:
    """Writes checkpoints in a background thread, one at a time.

    Attributes:
        is_joint: Whether each worker writes its shards. Then all workers call `submit` together.
    """

    def __init__(self, settings: Checkpoints, store: Store, strategy: Strategy) -> None:
        self._settings, self._store, self._strategy = settings, store, strategy
        self._writer = BackgroundWriter()
        self.is_joint = False
        self._joint: JointSave | None = None  # the save in progress
        self._saved: Place | None = None  # the last save of all workers
        self._has_submitted = False

    def write_jointly(self) -> None:
        """Makes each worker write its shards, if all can write to the folder of rank 0.

        All workers call this together. Each receives one number from each worker.
        """
        target, save = self._target(Place(0, 0))
        ranks = range(save.num_ranks)
        try:
            with target.workspace() as name:
                joint_save.put_text(target, Path(name), save.report_name(save.rank), "{}")
        except (OSError, pipelines.DataError):
            pass  # rank 0 does not find the file
        self._strategy.group.barrier()
        missing: list[int] = []
        if self._strategy.group.is_chief:
            missing = [rank for rank in ranks if target.read(save.report_name(rank)) is None]
        num_missing = int(self._strategy.group.gather([len(missing)])[0, 0])
        target.discard()
        self.is_joint = not num_missing
        if missing:
            say(
                f"Rank {missing[0]} cannot write to {self._store.folder} of rank 0. Rank 0 gathers "
                "all shards and writes whole checkpoints. To let each rank write its shards, use "
                "a bucket or a folder that all ranks share."
            )

    def job(self, snapshot: Snapshot, progress: Progress, epochs: int) -> Job:
        """Returns a checkpoint to write."""
        best = Place(*progress.best["place"]) if progress.best else None
        return Job(progress.place, snapshot.packed(), self.facts(progress, epochs), best)

    def submit(self, job: Job | None, is_last: bool = False) -> None:
        """Starts a write in the background thread, and reports the result of the previous one.

        Args:
            job: What to write; None on workers that write nothing.
            is_last: Whether training ends here. Then a write by all workers is completed before
                this returns, and repeated once if it fails.

        Raises:
            ConfigurationError: The previous write failed, and `on_error` is `"stop"`; or the last
                one failed twice.
        """
        try:
            self._wait()
            if self._has_submitted:
                interrupts.note_checkpoint()
        except _WRITE_ERRORS as error:
            self._has_submitted = False
            line = f"{self._failed(error)}. "
            if self._settings.on_error == "stop":
                raise ConfigurationError(f"{line}Earlier checkpoints are intact.") from error
            ends = job is None or is_last
            say(f"{line}{'' if ends else 'Training continues. '}Earlier checkpoints are intact.")
        # The other workers do not learn whether the chief's write succeeds.
        self._has_submitted |= job is not None or not self._strategy.group.is_chief
        if job is None:
            return
        if not self.is_joint:

            def write() -> None:
                self._store.write(job.place, job.packed, job.facts)
                self._store.keep(self._settings.keep, job.best)

            self._writer.submit(write)
        elif job.place != self._saved:
            self._start_joint(job)
            if is_last:
                self._complete_last(job)

    def finish(self) -> None:
        """Waits for the write in progress, and for its upload.

        Raises:
            ConfigurationError: The last checkpoint could not be uploaded.
        """
        try:
            if self._joint is not None:  # the training has failed, and other workers may be gone
                self._joint.deadline = time.monotonic() + _SECONDS_AFTER_ERROR
                self._joint = None
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
            "workers": strategy.group.size,
            "versions": versions(),
            "configuration": dict(self._settings.configuration),
        }

    def _failed(self, error: Exception) -> str:
        reason = _NODE.sub("", first_line(error))
        return f"Could not write a checkpoint to {self._settings.folder}: {reason}"

    # ---- writing by all workers ----

    def _target(self, place: Place) -> tuple[Target, JointSave]:
        """Returns where to put the files of a new save by all workers, and the save."""
        group = self._strategy.group
        token = group.broadcast_object(uuid.uuid4().hex[:8])
        save = JointSave(place, token, group.rank, group.size)
        return target_at(self._store.folder, save, self._settings.before_upload), save

    def _start_joint(self, job: Job) -> None:
        target, self._joint = self._target(job.place)
        self._writer.submit(functools.partial(self._write_joint, job, target, self._joint))

    def _write_joint(self, job: Job, target: Target, save: JointSave) -> None:
        """Writes the part of this worker; on the chief, completes the checkpoint."""
        try:
            report = joint_save.write_part(target, job.packed, save)
            if save.rank:
                return
            joint_save.complete(target, report, job.packed.text, job.facts, save)
        except BaseException:
            if not save.rank:  # the others may still be writing, or succeed later
                target.discard()
            raise
        self._store.clean()
        self._store.keep(self._settings.keep, job.best)

    def _wait(self) -> None:
        """Waits for the write in progress; with all workers, if they write together.

        Raises:
            OSError, tf.errors.OpError: A write failed. If all workers write together, all raise.
        """
        save, self._joint = self._joint, None
        if save is None:
            self._writer.wait()
            return
        error = None if self._strategy.group.is_chief else self._error()
        failed = np.flatnonzero(self._strategy.group.gather([error is not None]))
        if self._strategy.group.is_chief:
            save.deadline = 0.0 if len(failed) else save.deadline
            error = self._error()
        has_chief_failed = bool(self._strategy.group.gather([error is not None])[0, 0])
        if error is not None and not (self._strategy.group.is_chief and len(failed)):
            raise error
        if len(failed) or has_chief_failed:
            rank = failed[0] if len(failed) else 0
            raise OSError(f"rank {rank} could not write its part, and reports the reason")
        self._saved = save.place

    def _error(self) -> Exception | None:
        """Waits for this worker's thread, and returns the error of its write."""
        try:
            self._writer.wait()
        except _WRITE_ERRORS as error:
            return error
        return None

    def _complete_last(self, job: Job) -> None:
        try:
            self._wait()
        except _WRITE_ERRORS as error:
            say(f"{self._failed(error)}. Trying again.")
            try:
                self._start_joint(job)
                self._wait()
            except _WRITE_ERRORS as again:
                raise ConfigurationError(
                    f"{self._failed(again)}. Earlier checkpoints are intact."
                ) from again


def say(line: str) -> None:
    """Prints a line on standard error."""
    print(line, file=sys.stderr, flush=True)
