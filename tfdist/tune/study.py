"""A study of Optuna in a folder, and the loop that fills it with runs.

The study is a journal file, which several searches may append to at the same time, also on several
hosts that share the folder. Each search holds a lock as long as it lives. So the trials of a search
that was killed are known: they start again, and resume from the checkpoints in their run folders.
"""

from __future__ import annotations

import contextlib
import itertools
import json
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
from tfdist.console import tables
from tfdist.errors import ConfigurationError, LaunchError
from tfdist.launcher import orphans, processes
from tfdist.tune import space
from tfdist.tune.space import Dimension
from tfdist.tune.trial_process import TrialProcess

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


class Result(NamedTuple):
    """A run of the study.

    Attributes:
        folder: Its run folder.
        values: The flags that were searched, as on the command line.
        value: The metric; None if there is none.
        state: `"complete"`, `"pruned"`, `"failed"`, `"running"` or `"waiting"`.
    """

    folder: Path
    values: dict[str, str]
    value: float | None
    state: str


class Study:
    """A study and its folder.

    Args:
        folder: Folder of the journal and of the runs; is created if it does not exist.
        dimensions: The flags to search.
        metric: Name of the metric to optimize.
        training: Flags that all runs share.
        maximize: Whether more of the metric is better.
        sampler: `"tpe"`, `"random"` or `"grid"`.
        pruning: Whether to stop runs that are worse than the median.
        seed: Seed of the sampler.

    Raises:
        ConfigurationError: The folder has a study of something else, or a grid has a range of
            floats.
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
        folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / _JOURNAL))),
            study_name="search",
            direction="maximize" if maximize else "minimize",
            pruner=optuna.pruners.MedianPruner() if pruning else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        self._check_same()
        # Another seed after each trial: a search that resumes must not repeat its first choices.
        seed += len(self._study.get_trials(deepcopy=False))
        samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        self._is_grid = sampler == "grid"
        self._study.sampler = samplers[sampler if not self._is_grid else "random"](seed=seed)
        self._name = uuid.uuid4().hex[:8]

    def _check_same(self) -> None:
        described = {
            "over": [list(dimension) for dimension in self._dimensions],
            "metric": self.metric,
            "training": self._training,
        }
        described = json.loads(json.dumps(described))
        known = self._study.user_attrs.get("search", described)
        for name, value in described.items():
            if known[name] != value:
                raise ConfigurationError(
                    f"{self.folder} has a study with other flags ({name}: {known[name]}, not "
                    f"{value}). Use another folder with --folder, or the same flags."
                )
        self._study.set_user_attr("search", described)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Marks the trials that begin in this block as running, until the block or process ends."""
        lock = FolderLock(self.folder / _SEARCHES / self._name)
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def requeue_lost(self) -> int:
        """Queues the trials again whose search was killed; returns how many there are."""
        alive = {self._name: True}
        lost = 0
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            search = trial.user_attrs.get("search")
            if search is None:
                continue
            if search not in alive:
                alive[search] = FolderLock(self.folder / _SEARCHES / search).is_held()
            if not alive[search]:
                with contextlib.suppress(ValueError):  # another search was faster
                    self._study.tell(trial.number, state=TrialState.FAIL)
                    folder = {"folder": trial.user_attrs["folder"]}
                    self._study.enqueue_trial(trial.params, user_attrs=folder)
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
        name = trial.user_attrs.get("folder", f"trial-{trial.number:03d}")
        trial.set_user_attr("values", values)
        trial.set_user_attr("folder", name)
        trial.set_user_attr("search", self._name)
        return trial, self.folder / name, [*self._training, *space.flags(values)]

    def num_begun(self) -> int:
        """Returns the number of runs that have ended, run, or will be resumed."""
        return len({result.folder for result in self.results()})

    def has_next(self, trials: int) -> bool:
        """Returns whether there is something left to begin in a study of that many runs."""
        if self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return True  # the run of a search that was killed
        return self.num_begun() < trials and not (self._is_grid and self._untried() is None)

    def _untried(self) -> dict[str, Any] | None:
        """Returns the first combination of a grid that has no trial yet; None if there is none."""
        tried = [trial.params for trial in self._study.get_trials(deepcopy=False)]
        names = [dimension.name for dimension in self._dimensions]
        for values in itertools.product(*(one.all_values() for one in self._dimensions)):
            if (combination := dict(zip(names, values, strict=True))) not in tried:
                return combination
        return None

    def tell(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        """Records how a trial ended."""
        self._study.tell(trial, value, state=state)

    def results(self) -> list[Result]:
        """Returns all runs, the best first; a run that was resumed counts once."""
        found: dict[str, FrozenTrial] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if "folder" in trial.user_attrs:
                found[trial.user_attrs["folder"]] = trial  # the last one has resumed the others
        trials = sorted(found.values(), key=self._rank)
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
    """Runs trials until the study has as many as wanted.

    Args:
        study: The study.
        program: Command that trains, without flags.
        trials: Number of runs of the study.
        jobs: Number of runs at the same time.
        gpus_per_trial: GPUs that each run sees; 0: all.

    Raises:
        ConfigurationError: The training has no such metric, or there are too few GPUs.
        LaunchError: The first runs all fail.
    """
    mark = uuid.uuid4().hex
    with (
        study.locked(),
        processes.signals_raise(),
        # Also after a SIGKILL of this process, no run continues that nobody waits for.
        orphans.watching(mark),
    ):
        if lost := study.requeue_lost():
            tables.text(f"{lost} runs were killed, and are resumed.")
        slots = _Slots(study, program, orphans.marked(mark), gpus_per_trial, jobs)
        try:
            while slots.fill(trials):
                slots.poll()
                time.sleep(_POLL_SECONDS)
        finally:
            slots.stop()


class _Slots:
    """The runs of this search that are running, each in a slot that has GPUs of its own."""

    def __init__(
        self, study: Study, program: Sequence[str], environ: dict[str, str], num_gpus: int,
        jobs: int,
    ) -> None:  # fmt: skip
        self._study, self._program = study, program
        self._environs = [dict(environ) for _ in range(jobs)]
        for place, variables in enumerate(self._environs if num_gpus else ()):
            variables[gpus.VISIBLE] = gpus.assigned(num_gpus, place, os.environ)[gpus.VISIBLE]
        self._running: dict[int, tuple[optuna.Trial, TrialProcess]] = {}
        self._reported: dict[int, set[int]] = {}  # epochs
        self._pruned: set[int] = set()
        self._num_failed = self._num_complete = 0

    def fill(self, trials: int) -> bool:
        """Begins trials in free slots, and returns whether any run is running."""
        for place, environ in enumerate(self._environs):
            if place not in self._running and self._study.has_next(trials):
                trial, folder, flags = self._study.next()
                words = [*self._program, *flags, "--run-dir", str(folder), "--resume", "auto"]
                words += ["--verbose", "0"]
                self._reported[place] = set()
                self._running[place] = trial, TrialProcess(words, folder, environ)
        return bool(self._running)

    def poll(self) -> None:
        """Records new epochs of all runs, and runs that have ended."""
        for place, (trial, process) in list(self._running.items()):
            code = process.code  # before the metrics: those of an ended run are complete
            values = process.values(self._study.metric)
            for epoch in values.keys() - self._reported[place]:
                trial.report(values[epoch], epoch)
            self._reported[place] = set(values)
            if code is not None:
                del self._running[place]
                self._end(place, trial, process, code, values)
            elif place not in self._pruned and values and trial.should_prune():
                self._pruned.add(place)
                process.preempt()

    def _end(
        self, place: int, trial: optuna.Trial, process: TrialProcess, code: int,
        values: dict[int, float],
    ) -> None:  # fmt: skip
        pruned = place in self._pruned
        self._pruned.discard(place)
        chosen = ", ".join(f"{name} {value}" for name, value in trial.user_attrs["values"].items())
        name = f"{process.folder.name}: {chosen}"
        if code == 0 and values:
            self._num_complete += 1
            value = values[max(values)]
            self._study.tell(trial, TrialState.COMPLETE, value)
            tables.text(f"{name}: {self._study.metric} {value:.4f}")
        elif pruned and values:
            self._study.tell(trial, TrialState.PRUNED)
            tables.text(f"{name}: stopped after {len(values)} epochs, worse than the median")
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
        """Stops the runs that are running; a search of the same folder resumes them."""
        for _, process in self._running.values():
            process.preempt()
        for _, process in self._running.values():
            process.wait()
