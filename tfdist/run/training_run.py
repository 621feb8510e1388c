"""One run of `python -m tfdist.train`: set-up, training, and results."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from pipelines.storage import is_url
from tfdist import cluster
from tfdist.callbacks.batch_size import BatchSize
from tfdist.callbacks.curves import Curves
from tfdist.callbacks.ledger import LedgerLog
from tfdist.callbacks.loss_spikes import LossSpikes
from tfdist.callbacks.profile import Profile
from tfdist.callbacks.step_log import peak_memory
from tfdist.checkpoint.store import store_at
from tfdist.cluster.deadline import seconds_waited
from tfdist.config import TrainConfig
from tfdist.console import tables
from tfdist.errors import ConfigurationError, LossSpikeError, Preempted, TfdistError
from tfdist.groups.agreement import from_rank0
from tfdist.loops import interrupts
from tfdist.loops.fit import CheckpointHooks
from tfdist.run import from_config, loggers, memory, recipe, reports, saved_model
from tfdist.run.folder import RunFolder
from tfdist.run.from_config import Watched, check_spread
from tfdist.run.provenance import provenance
from tfdist.run.saved_model import full_disk_message, save_model

if TYPE_CHECKING:
    from tfdist.strategies import Strategy


#: How often a run returns to the same checkpoint.
_MOST_ROLLBACKS = 3


@dataclass
class Ending:
    """How a run ended.

    Attributes:
        stopped: What stopped it before its last epoch; empty otherwise.
        raised: The interrupt that stopped it.
        full: The system's message on a full disk, if that stopped it.
        seconds: Duration of the training.
    """

    stopped: str = ""
    raised: KeyboardInterrupt | None = None
    full: str = ""
    seconds: float = 0.0


class TrainingRun:
    """Data, trainer and run folder of a configuration.

    Raises:
        TfdistError: The configuration is invalid or not supported.
    """

    def __init__(self, config: TrainConfig, planned: str = "") -> None:
        self._config, self._began, self._planned = config, time.monotonic(), planned
        saved_model.check_exporters(config.export)
        loggers.check(config.logger)
        # Before anything is built; only the chief reads checkpoints.
        is_path = config.resume not in ("auto", "never") and not is_url(config.resume)
        if cluster.is_chief() and is_path and not Path(config.resume).exists():
            raise ConfigurationError(
                f"--resume {config.resume}: there is no such folder. Give the path of a checkpoint "
                "or of a run folder, or use --resume auto to continue the run of the same command."
            )
        workload = self._recipe = recipe.find(config.recipe)
        keras.utils.set_random_seed(config.seed)
        strategy = self._strategy = from_config.make_strategy(config)
        self._memory_before = peak_memory() if planned else 0
        check_spread(config, workload, strategy)
        watched = Watched(config)
        read = watched.as_config()
        self._data, self._validation = from_config.make_data(read, workload, strategy)
        steps_per_epoch = recipe.num_steps(self._data)
        trainer = from_config.make_trainer(read, workload, strategy, steps_per_epoch)
        extra = from_config.make_callbacks(read, workload)
        self._trainer = trainer
        facts = reports.what_runs(
            trainer,
            config,
            self._data,
            watched.unread(workload),
            recipe.made_smaller(workload, config) if config.smoke else {},
        )
        sources = provenance(config, strategy, workload)
        folder = self._folder = _shared_folder(strategy, config, trainer.model, facts, sources)
        with self._discarding_on_error():
            trainer.checkpoints = from_config.make_checkpoints(
                config, folder.checkpoints, folder.upload
            )
        trainer.skipped_steps = json.loads(
            from_rank0(strategy.group, lambda: json.dumps(folder.skipped_steps()))
        )
        self._talks = strategy.group.is_chief and config.verbose != 0
        if self._talks:
            tables.facts({**facts, "run folder": folder.location}.items())
        if strategy.group.is_chief:
            spec = getattr(self._data, "element_spec", None)
            warning = memory.shortage(self._config, self._trainer.model, self._strategy, spec)
            if warning:
                print(f"warning: {warning}", file=sys.stderr, flush=True)

        self.history = keras.callbacks.History()
        self._curves = Curves(folder.curves, f"smoke run: {reports.SMOKE}" if config.smoke else "")
        self._profiles = [Profile(folder.tensorboard, trainer.stats)] if config.profile else []
        self._log = loggers.FollowedLog(folder, config, trainer.stats)
        spikes = [] if config.on_spike == "off" else [LossSpikes(trainer.stats, config.on_spike)]
        self._callbacks = [
            *from_config.averages(config), *extra, self.history, self._log, self._curves, *spikes
        ]  # fmt: skip
        self._ledger = LedgerLog(folder.path / "ledger.json", trainer.stats, seconds_waited())

    def close(self) -> None:
        """Uploads the files of a failed run, and releases the lock on the run folder."""
        self._folder.close()

    def fit(self) -> Ending:
        """Trains until the last epoch, or until something stops the training.

        Raises:
            Exception: An error other than a full disk, an interrupt, or the time limit.
        """
        config, strategy, ending = self._config, self._strategy, Ending()
        is_chief = strategy.group.is_chief
        batches = BatchSize(self._trainer.stats, from_config.first_batch_size(config))
        left = config.max_time and self._began + config.max_time - time.monotonic()
        fitting = time.perf_counter()
        with (
            _output_to(None if is_chief else self._folder.log(strategy.group.rank)),
            closing(self._log),
        ):
            self._folder.start_uploads()
            try:
                with (
                    interrupts.deadline(left),
                    self._noting_full_disk(ending),
                    self._discarding_on_error(),
                ):
                    while not self._is_trained([batches, *self._profiles]):
                        pass
            except interrupts.TimeIsUp:
                ending.stopped = "by --max-time"
            except KeyboardInterrupt as raised:
                preempted = isinstance(raised, Preempted)
                ending.stopped = "by its scheduler" if preempted else "by an interrupt"
                ending.raised = raised
        ending.seconds = time.perf_counter() - fitting
        if is_chief:
            self._ledger.close(ended=not ending.full)
        with self._noting_full_disk(ending):
            for one in self._profiles:
                one.close()
        return ending

    def _is_trained(self, callbacks: Sequence[keras.callbacks.Callback]) -> bool:
        """Trains. Returns False if the loss left its band, and the run must continue."""
        config = self._config
        try:
            self._trainer.fit(
                self._data,
                validation_data=self._validation,
                callbacks=[*self._callbacks, *callbacks, self._ledger],
                **from_config.fit_arguments(config, self._data, self._validation),
            )
        except LossSpikeError as spike:
            if config.on_spike != "rollback":
                raise
            self._roll_back(spike)
            return False
        return True

    def _roll_back(self, spike: LossSpikeError) -> None:
        """Prepares a training from the last checkpoint, without the steps of a spike."""
        config, trainer, group = self._config, self._trainer, self._strategy.group
        store = store_at(self._folder.checkpoints)
        places = json.loads(from_rank0(group, lambda: json.dumps(store.places())))
        last = max((step for step, _ in places), default=0)
        skipped = trainer.skipped_steps = [*trainer.skipped_steps, spike.steps]
        if not places:
            raise LossSpikeError(f"{spike} There is no checkpoint to return to.") from spike
        if sum(first > last for first, _ in skipped) > _MOST_ROLLBACKS:
            raise LossSpikeError(
                f"{spike} Returning to step {last} has not helped {_MOST_ROLLBACKS} times: lower "
                "the learning rate, or clip gradients (--clip-norm)."
            ) from spike
        assert trainer.checkpoints is not None
        trainer.checkpoints = dataclasses.replace(trainer.checkpoints, resume="auto")
        trainer.last_fit = CheckpointHooks()  # the next fit continues this one
        keras.utils.set_random_seed(config.seed)  # the data begin as in a new process
        self._data, self._validation = from_config.make_data(config, self._recipe, self._strategy)
        self._ledger.begin_again()
        if group.is_chief:
            self._folder.skip(skipped)
            first, last_of_spike = spike.steps
            print(
                f"warning: {spike} Training returns to step {last} and leaves the batches of steps "
                f"{first} to {last_of_spike} out.",
                file=sys.stderr,
                flush=True,
            )

    def finish(self, ending: Ending) -> None:
        """Saves the model, prints the summary, and exports.

        Raises:
            ConfigurationError: Some files could not be written.
            KeyboardInterrupt: An interrupt stopped the training.
        """
        saved = self._save_and_tell(ending)
        self._raise_if_full(ending, saved)
        if ending.raised:
            if self._strategy.group.is_chief and self._trainer.checkpoints:
                folder = self._folder
                if self._trainer.stats.last_call is None or store_at(folder.checkpoints).places():
                    where = shlex.join(["--run-dir", folder.location])
                    advice = f"To resume, run the same command with {where} --resume auto"
                else:
                    advice = (
                        "No checkpoint was saved, because the run was stopped within a step. To "
                        "start again, use another folder with --run-dir, or remove "
                        f"{folder.location}."
                    )
                print(advice, file=sys.stderr)
            try:
                self._finish_folder(None)
            finally:
                self._strategy.group.barrier()  # the launcher stops all workers when one exits
            raise ending.raised
        exchanged = None
        for one in self._profiles:
            exchanged = reports.measure_exchange(
                self._strategy, self._trainer.model
            )  # all workers do
            if self._talks:
                reports.print_profile(one, exchanged)
        if self._strategy.group.is_chief:
            saved_model.export(self._config.export, self._folder.model, self._trainer.model)
            with self._noting_full_disk(ending):
                self._report()
            self._raise_if_full(ending, saved)
        self._finish_folder(exchanged and exchanged[0])

    def _finish_folder(self, exchange: float | None) -> None:
        if self._strategy.group.is_chief:
            self._ledger.finish(exchange)
        self._folder.finish()

    def _report(self) -> None:
        """Calls the recipe's `report` with the saved model, if the recipe defines it."""
        if not hasattr(self._recipe, "report"):
            return
        model = saved_model.load_uncompiled(self._folder.model)
        files = recipe.report(self._recipe, self._config, model, self._folder.path)
        if self._talks and files:
            print(f"Pictures in {self._folder.location}: {', '.join(files)}")

    @contextmanager
    def _discarding_on_error(self) -> Iterator[None]:
        """Removes the run folder if training fails before its first step."""
        try:
            yield
        except Exception:
            if self._strategy.group.is_chief and self._trainer.stats.last_call is None:
                self._folder.discard()
            raise

    @contextmanager
    def _noting_full_disk(self, ending: Ending) -> Iterator[None]:
        """Records a full disk in `ending` instead of raising the error."""
        try:
            yield
        except Exception as error:
            full = full_disk_message(error) if self._strategy.group.is_chief else ""
            is_refused = isinstance(error, TfdistError) and self._trainer.stats.last_call is None
            if not full or is_refused:
                raise  # other workers write only their log
            ending.full = ending.full or full

    def _save_and_tell(self, ending: Ending) -> Path:
        """Saves the model, on the chief, and prints the summary. Returns the model's file."""
        saved, folder = self._folder.model, self._folder
        if self._strategy.group.is_chief:
            if ending.stopped:
                with self._noting_full_disk(ending):
                    self._curves.on_train_end()
            # Without a step there is no result that a restart must not overwrite.
            if not ending.raised or self._trainer.stats.last_call is not None:
                saved, problem = save_model(self._trainer.model, saved)
                ending.full = ending.full or str(problem or "")
        if self._talks:
            reports.summary(
                self.history.history, ending.seconds, self._trainer.stats, folder.location,
                ending.stopped, self._trainer.checkpoints is not None, self._strategy.summary(),
                self._planned, self._config.batch_size, self._memory_before,
            )  # fmt: skip
        return saved

    def _raise_if_full(self, ending: Ending, saved: Path) -> None:
        if not ending.full:
            return
        is_full = full_disk_message(OSError(ending.full))
        resume = ", then continue with --resume auto" if self._trainer.checkpoints else ""
        raise ConfigurationError(
            f"{self._folder.location}: some files could not be written: {ending.full}. The model "
            f"after {int(self._trainer.model.optimizer.iterations)} steps is {saved}. "
            f"{'Free some space' if is_full else 'Make the folder writable'}{resume}."
        )


def _shared_folder(strategy: Strategy, config: TrainConfig, *facts: Any) -> RunFolder:
    """Creates the run folder on rank 0, which holds its lock, and returns it on every worker."""
    created: list[RunFolder] = []

    def create() -> str:
        created.append(RunFolder.create(config, *facts))
        return created[0].location

    location = from_rank0(strategy.group, create)
    return created[0] if created else RunFolder.of_worker(location, strategy.group.rank)


@contextmanager
def _output_to(path: Path | None) -> Iterator[None]:
    """Redirects the output of this process and its libraries to a file; None changes nothing."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    streams = (sys.stdout, sys.stderr)
    before = [os.dup(stream.fileno()) for stream in streams]
    with path.open("a") as file:
        for stream in streams:
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    finally:
        for stream, descriptor in zip(streams, before, strict=True):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)
