"""The state of a training, taken between two steps and given to one that goes on.

What is the same on all workers is the chief's. What waits on each replica is brought together, for
which all workers have to ask for the state at the same step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import keras

from tfdist.checkpoint import callback_state, export, variables
from tfdist.checkpoint.snapshot import Snapshot
from tfdist.checkpoint.store import Place
from tfdist.loops.compiled_functions import CompiledFunctions
from tfdist.loops.data_handler import DataHandler, EpochDataHandlers
from tfdist.strategies.base import Strategy


@dataclass
class Progress:
    """How far a training is.

    Attributes:
        epoch: Epochs that have ended; the number, from 0, of the one that goes on or comes next.
        step: Steps made in that epoch.
        total: Steps made in all epochs.
        logs: After the last of these steps, or of the last epoch.
        stopped: Whether a callback has ended the training.
        best: The best value so far of what `keep_best` names, and where that was.
    """

    epoch: int = 0
    step: int = 0
    total: int = 0
    logs: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False
    best: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """By which a checkpoint is called."""
        return Place(self.total, self.epoch)


class TrainingState:
    """Takes and gives the state of one training.

    Args:
        model: To train.
        strategy: Its workers.
        functions: Of the model; know what its steps change.
        feeds: Of the training.
        tested: Those of its validation.

    Attributes:
        callbacks: Of this worker.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        functions: CompiledFunctions,
        feeds: EpochDataHandlers,
        tested: Sequence[DataHandler],
    ) -> None:
        self._model, self._strategy, self._functions = model, strategy, functions
        self._feeds, self._tested = feeds, tested
        self.callbacks: Sequence[keras.callbacks.Callback] = ()

    @functools.cached_property
    def _architecture(self) -> str | None:
        return export.architecture(self._model)

    def has_waiting(self) -> bool:
        """Tells whether gradients wait on the replicas, so that all workers have to ask."""
        accumulation = self._functions.accumulation
        return accumulation is not None and accumulation.has_waiting()

    def take(self, progress: Progress) -> Snapshot | None:
        """Returns the state as it is now, on the chief; None on other workers."""
        accumulation, waiting = self._functions.accumulation, None
        if accumulation is not None and accumulation.has_waiting():
            waiting = variables.take_gradient_sums(self._strategy, accumulation.waiting)
        if not self._strategy.is_chief:
            return None
        snapshot, feeding = Snapshot(), self._feeds.of_epoch(progress.epoch)
        variables.take(self._functions.variables(), snapshot)
        snapshot.state = {
            "progress": asdict(progress),
            "callbacks": callback_state.states(self.callbacks),
            "data": [f.state(progress.step if f is feeding else 0) for f in self._all_feeds()],
            "waiting gradients": waiting,
            export.MODEL: self._architecture,
        }
        return snapshot

    def give_variables(self, saved: Snapshot, where: str, within_epoch: bool) -> None:
        """Gives the model and its optimizers what they were.

        Args:
            saved: The state.
            where: It lies.
            within_epoch: Whether metrics go on.

        Raises:
            ConfigurationError: It is of another model.
        """
        with self._strategy.collective_section():
            variables.give(self._functions.variables(), saved, where, within_epoch)
        waiting, accumulation = saved.state["waiting gradients"], self._functions.accumulation
        if waiting and accumulation is not None:
            variables.give_gradient_sums(self._strategy, accumulation.waiting, waiting)

    def before_training(self, saved: Snapshot) -> None:
        """Has callbacks that open files go on with them."""
        callback_state.before_training(self.callbacks, saved.state["callbacks"])

    def give_callbacks(self, saved: Snapshot) -> None:
        """Gives callbacks what they remembered."""
        callback_state.restore(self.callbacks, saved.state["callbacks"])

    def give_data(self, saved: Snapshot) -> None:
        """Has the next epoch begin where the data were."""
        for feed, where in zip(self._all_feeds(), saved.state["data"], strict=False):
            feed.restore(where)

    def _all_feeds(self) -> list[DataHandler]:
        """Each once, in an order that is always the same."""
        return list(dict.fromkeys([*self._feeds.all(), *self._tested]))
