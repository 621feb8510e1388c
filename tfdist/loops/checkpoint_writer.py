"""Writes checkpoints in a background thread: on the chief, or on all workers together."""

from __future__ import annotations

import functools
import re
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import pipelines
from tfdist.checkpoint import joint_save
from tfdist.checkpoint.joint_save import JointSave, Target, target_at
from tfdist.checkpoint.manifest import versions
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.snapshot import Packed, Snapshot
from tfdist.checkpoint.store import BackgroundWriter, Place, Store
from tfdist.errors import ConfigurationError, first_line
from tfdist.loops import interrupts
from tfdist.loops.training_state import Progress
from tfdist.strategies.base import Strategy

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

    Args:
        settings: Which checkpoints to keep, and whether a failed write stops the run.
        store: Where to write.
        strategy: The strategy, which is described in the manifest.

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
        """Returns a checkpoint to write.

        Args:
            snapshot: The state.
            progress: The progress of the run at that point.
            epochs: Total number of epochs.
        """
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
            self._writer.submit(functools.partial(self._write, job))
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

    def _write(self, job: Job) -> None:
        self._store.write(job.place, job.packed, job.facts)
        self._store.keep(self._settings.keep, job.best)

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
