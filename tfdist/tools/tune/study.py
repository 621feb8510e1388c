"""An Optuna study in a folder, and the loop that runs its trials.

The study is a journal file, which several searches may append to at the same time, also on several
hosts that share the folder. Each search process holds a lock. If the lock of a running trial's
search is free, the search was killed: its trials are queued again, and resume from the checkpoints
in their run folders.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from tfdist.checkpoint.lock import FolderLock
from tfdist.cluster import gpus
from tfdist.cluster.launcher import orphans, processes
from tfdist.console import tables
from tfdist.errors import ConfigurationError, LaunchError
from tfdist.tools.tune.space import Dimension, flags
from tfdist.tools.tune.trial_process import TrialProcess

_POLL_SECONDS = 0.2
#: The search ends if this many runs fail before any succeeds.
_MAX_FIRST_FAILURES = 3
_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}
_JOURNAL, _SEARCHES = "study.journal", "searches"
#: Attribute of a trial that resumes the run of an interrupted trial: the number of that trial.
_RESUMES = "resumes"


class Result(NamedTuple):
    """A run of the study.

    Attributes:
        folder: Its run folder.
        values: The values of the searched flags, as written on the command line.
        value: The metric, or None if it is unknown.
        state: `"complete"`, `"pruned"`, `"failed"`, `"running"` or `"waiting"`.
    """

    folder: Path
    values: dict[str, str]
    value: float | None
    state: str


class Study:
    """A study and its folder.

    Raises:
        ConfigurationError: The folder contains a study with other settings or cannot be created,
            or a grid search has a range of floats.
    """

    def __init__(
        self,
        folder: Path,
        dimensions: Sequence[Dimension],
        metric: str,
        training: list[str],
        *,
        maximize: bool,
        sampler: str,
        pruning: bool,
        seed: int,
    ) -> None:
        self.folder, self.metric, self.maximize = folder, metric, maximize
        if sampler == "grid":
            for dimension in dimensions:
                dimension.all_values()  # raises an error for a range of floats
        self._dimensions, self._training = dimensions, training
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot write the study: {error}. Use another folder with --folder."
            ) from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / _JOURNAL))),
            study_name="search",
            direction="maximize" if maximize else "minimize",
            pruner=optuna.pruners.MedianPruner() if pruning else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        described = {
            "over": [list(dimension) for dimension in self._dimensions],
            "metric": self.metric,
            "training": self._training,
        }
        described = json.loads(json.dumps(described))
        stored = self._study.user_attrs.get("search", described)
        for name, value in described.items():
            if stored[name] != value:
                raise ConfigurationError(
                    f"{self.folder} contains a study with other flags ({name}: {stored[name]}, not "
                    f"{value}). Use another folder with --folder, or the same flags."
                )
        self._study.set_user_attr("search", described)
        # Depends on the trials so far, so that a resumed search does not repeat its first choices.
        seed += len(self._study.get_trials(deepcopy=False))
        samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        self._is_grid = sampler == "grid"
        self._study.sampler = samplers[sampler if not self._is_grid else "random"](seed=seed)
        self._name = uuid.uuid4().hex[:8]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of this search, which shows that its trials are running."""
        lock = FolderLock(self.folder / _SEARCHES / self._name)
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def requeue_interrupted(self) -> int:
        """Queues the trials of killed searches again. Returns their number."""
        alive = {self._name: True}
        lost = 0
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            search = trial.user_attrs.get("search")
            if search is None:
                continue
            if search not in alive:
                alive[search] = FolderLock(self.folder / _SEARCHES / search).is_held()
            if not alive[search]:
                with contextlib.suppress(ValueError):  # another search has already queued it
                    self._study.tell(trial.number, state=TrialState.FAIL)
                    attributes = {"folder": trial.user_attrs["folder"], _RESUMES: trial.number}
                    self._study.enqueue_trial(trial.params, user_attrs=attributes)
                    lost += 1
        return lost

    def next(self) -> tuple[optuna.Trial, Path, list[str]]:
        """Returns a new trial with its run folder and its flags."""
        if self._is_grid and (combination := self._untried()) is not None:
            waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if not waiting:
                self._study.enqueue_trial(combination)
        trial = self._study.ask()
        values = {dimension.name: dimension.suggest(trial) for dimension in self._dimensions}
        name = trial.user_attrs.get("folder")
        if not name:
            # Trials that resume a run have numbers but no own name. Searches of the same study
            # never choose the same one, because earlier trials do not change.
            earlier = self._study.get_trials(deepcopy=False)[: trial.number]
            num_resuming = sum(_RESUMES in one.user_attrs for one in earlier)
            name = f"trial-{trial.number - num_resuming:03d}"
        trial.set_user_attr("values", values)
        trial.set_user_attr("folder", name)
        trial.set_user_attr("search", self._name)
        return trial, self.folder / name, [*self._training, *flags(values)]

    def num_started(self) -> int:
        """Returns the number of runs that have ended, are running, or will be resumed."""
        return len({result.folder for result in self.results()})

    def has_next(self, trials: int) -> bool:
        """Returns whether a study of `trials` runs has another run to start."""
        if self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return True  # queued by `requeue_interrupted`
        return self.num_started() < trials and not (self._is_grid and self._untried() is None)

    def _untried(self) -> dict[str, Any] | None:
        """Returns the first combination of a grid without a trial, or None if all have one."""
        tried = [trial.params for trial in self._study.get_trials(deepcopy=False)]
        names = [dimension.name for dimension in self._dimensions]
        for values in itertools.product(*(d.all_values() for d in self._dimensions)):
            if (combination := dict(zip(names, values, strict=True))) not in tried:
                return combination
        return None

    def tell(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        """Records how a trial ended."""
        self._study.tell(trial, value, state=state)

    def results(self) -> list[Result]:
        """Returns all runs, the best first. A resumed run counts once."""
        last_trials: dict[str, FrozenTrial] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if "folder" in trial.user_attrs:
                last_trials[trial.user_attrs["folder"]] = trial  # the last one resumed the others
        trials = sorted(last_trials.values(), key=self._rank)
        return [
            Result(
                self.folder / trial.user_attrs["folder"],
                trial.user_attrs.get("values", {}),
                trial.value if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) else None,
                _STATES[trial.state],
            )
            for trial in trials
        ]  # fmt: skip

    def _rank(self, trial: FrozenTrial) -> tuple[bool, float]:
        if trial.state != TrialState.COMPLETE or trial.value is None:
            return True, trial.number
        return False, -trial.value if self.maximize else trial.value


def search(
    study: Study, program: Sequence[str], trials: int, jobs: int, gpus_per_trial: int
) -> None:
    """Runs trials until the study has `trials` runs.

    Raises:
        ConfigurationError: A run does not report the metric, or there are too few GPUs.
        LaunchError: The first runs all fail.
    """
    mark = uuid.uuid4().hex
    with (
        study.locked(),
        processes.signals_raise(),
        # Terminates the runs even if this process is killed by SIGKILL.
        orphans.watching(mark),
    ):
        if lost := study.requeue_interrupted():
            tables.text(f"Runs of a killed search that resume: {lost}")
        slots = _Slots(study, program, orphans.marked(mark), gpus_per_trial, jobs)
        try:
            while slots.fill(trials):
                slots.poll()
                time.sleep(_POLL_SECONDS)
        finally:
            slots.stop()


class _Slots:
    """The running trials of this search, each in a slot with its own GPUs."""

    def __init__(
        self, study: Study, program: Sequence[str], environ: dict[str, str], num_gpus: int,
        jobs: int,
    ) -> None:  # fmt: skip
        self._study, self._program = study, program
        self._environs = [dict(environ) for _ in range(jobs)]
        for slot, variables in enumerate(self._environs if num_gpus else ()):
            variables[gpus.VISIBLE] = gpus.assigned(num_gpus, slot, os.environ)[gpus.VISIBLE]
        self._running: dict[int, tuple[optuna.Trial, TrialProcess]] = {}
        self._reported: dict[int, set[int]] = {}  # epochs
        self._pruned: set[int] = set()
        self._num_failed = self._num_complete = 0

    def fill(self, trials: int) -> bool:
        """Starts trials in free slots, and returns whether any trial is running."""
        for slot, environ in enumerate(self._environs):
            if slot not in self._running and self._study.has_next(trials):
                trial, folder, flags = self._study.next()
                words = [*self._program, *flags, "--run-dir", str(folder), "--resume", "auto"]
                words += ["--verbose", "0"]
                self._reported[slot] = set()
                self._running[slot] = trial, TrialProcess(words, folder, environ)
        return bool(self._running)

    def poll(self) -> None:
        """Records new epochs of the running trials, and trials that have ended."""
        for slot, (trial, process) in list(self._running.items()):
            code = process.code  # read first, so that the metrics of an ended run are complete
            values = process.values(self._study.metric)
            for epoch in values.keys() - self._reported[slot]:
                trial.report(values[epoch], epoch)
            self._reported[slot] = set(values)
            if code is not None:
                del self._running[slot]
                self._end(slot, trial, process, code, values)
            elif slot not in self._pruned and values and trial.should_prune():
                self._pruned.add(slot)
                process.preempt()

    def _end(
        self, slot: int, trial: optuna.Trial, process: TrialProcess, code: int,
        values: dict[int, float],
    ) -> None:  # fmt: skip
        pruned = slot in self._pruned
        self._pruned.discard(slot)
        chosen = ", ".join(f"{name} {value}" for name, value in trial.user_attrs["values"].items())
        name = f"{process.folder.name}: {chosen}"
        if code == 0 and values and math.isnan(value := values[max(values)]):
            self._study.tell(trial, TrialState.FAIL)
            tables.text(f"{name}: failed: {self._study.metric} is not finite in the last epoch")
        elif code == 0 and values:
            self._num_complete += 1
            self._study.tell(trial, TrialState.COMPLETE, value)
            tables.text(f"{name}: {self._study.metric} {value:.4f}")
        elif pruned and values:
            self._study.tell(trial, TrialState.PRUNED)
            tables.text(f"{name}: stopped after {len(values)} epochs: worse than the median")
        else:
            self._num_failed += 1
            self._study.tell(trial, TrialState.FAIL)
            tables.text(f"{name}: failed: {process.last_error()}")
            if not self._num_complete and self._num_failed >= _MAX_FIRST_FAILURES:
                raise LaunchError(
                    f"the first {self._num_failed} runs failed. The last error: "
                    f"{process.last_error()}"
                )

    def stop(self) -> None:
        """Stops the running trials. A later search in the same folder resumes them."""
        for _, process in self._running.values():
            process.preempt()
        for _, process in self._running.values():
            process.wait()
