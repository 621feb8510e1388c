"""The state of a run, which is saved between two steps and restored when the run resumes.

State that is the same on all workers is captured on the chief. Accumulated gradients of all
replicas are gathered, for which all workers must call `take` at the same step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import keras

from tfdist.checkpoint import export, variables
from tfdist.checkpoint.snapshot import OwnShards, Snapshot
from tfdist.checkpoint.store import Place
from tfdist.loops.callbacks import callback_states, restore_states, truncate_files
from tfdist.loops.data_handler import DataHandler, EpochDataHandlers, ValidationData
from tfdist.loops.observers import RunContext


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        epoch: Number of completed epochs, which is also the index of the current or next epoch.
        step: Number of completed steps in that epoch.
        total: Number of completed steps in all epochs.
        logs: Logs after the last step, or of the last epoch.
        stopped: Whether a callback has stopped training.
        best: The best value so far of the metric `keep_best`, and the place of its checkpoint.
        validated: `total` at the last evaluation within an epoch.
    """

    epoch: int = 0
    step: int = 0
    total: int = 0
    logs: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False
    best: dict[str, Any] = field(default_factory=dict)
    validated: int = 0

    @property
    def place(self) -> Place:
        """The place that names the checkpoint of this progress."""
        return Place(self.total, self.epoch)


class TrainingState:
    """Captures and restores the state of one `fit`."""

    def __init__(
        self,
        run: RunContext,
        callbacks: Sequence[keras.callbacks.Callback],
        handlers: EpochDataHandlers,
        validation: ValidationData | None,
        saves_frozen: bool = True,
    ) -> None:
        self._saves_frozen, self._frozen = saves_frozen, dict[str, int]()
        self._model, self._strategy, self._functions = run.model, run.strategy, run.functions
        self._callbacks, self._handlers, self._validation = callbacks, handlers, validation

    @functools.cached_property
    def _architecture(self) -> str | None:
        return export.architecture(self._model)

    def has_pending(self) -> bool:
        """Returns whether any replica has pending gradients; then all workers must call `take`."""
        accumulation = self._functions.accumulation
        return accumulation is not None and accumulation.has_pending()

    def is_divided(self) -> bool:
        """Returns whether each worker has only its shards of some variables."""
        return variables.are_divided(self._functions.variables())

    def own_shards(self) -> OwnShards:
        """Returns the shards that this worker reads itself from a checkpoint."""
        return variables.own_shards(self._functions.variables())

    def take(self, progress: Progress, in_parts: bool = False) -> Snapshot | None:
        """Returns the current state on the chief, and None on other workers.

        Args:
            progress: The progress of the run.
            in_parts: Whether each worker returns its shards, which the chief gathers otherwise.
        """
        accumulation, waiting = self._functions.accumulation, None
        if accumulation is not None and accumulation.has_pending():
            waiting = variables.capture_gradient_sums(self._strategy, accumulation.waiting)
        snapshot, is_chief = Snapshot(), self._strategy.group.is_chief
        snapshot.state[variables.FROZEN] = self._left_out(in_parts)
        if in_parts:
            variables.capture_parts(self._functions.variables(), snapshot, is_chief)
        if not is_chief:
            return snapshot if in_parts else None
        if not in_parts:
            variables.capture(self._functions.variables(), snapshot)
        current = self._handlers.of_epoch(progress.epoch)
        snapshot.state |= {
            "progress": asdict(progress),
            "callbacks": callback_states(self._callbacks),
            "data": [h.state(progress.step if h is current else 0) for h in self._all_handlers()],
            "waiting gradients": waiting,
            export.MODEL: self._architecture,
        }
        return snapshot

    def _left_out(self, in_parts: bool) -> dict[str, int]:
        """Returns the checksums of the weights that were frozen from the beginning, by name."""
        if self._saves_frozen:
            return {}
        frozen = variables.named_frozen(self._functions.variables(), self._model)
        if not self._frozen:
            group = self._strategy.group if in_parts else None
            self._frozen = variables.checksums(frozen, group)
        # Those that were trained in the meantime are saved from now on.
        self._frozen = {name: n for name, n in self._frozen.items() if name in frozen}
        return self._frozen

    def restore_variables(self, saved: Snapshot, where: str, within_epoch: bool) -> None:
        """Restores the model and its optimizers.

        Raises:
            ConfigurationError: The state is from another model.
        """
        with self._strategy.variables.collective_section():
            groups = self._functions.variables()
            if saved.state.get(variables.FROZEN) and not self._frozen:
                frozen = variables.named_frozen(groups, self._model)
                self._frozen = variables.checksums(frozen, self._strategy.group)
                variables.check_frozen(self._frozen, saved, where)
            variables.restore(groups, saved, where, within_epoch)
        waiting, accumulation = saved.state["waiting gradients"], self._functions.accumulation
        if waiting and accumulation is not None:
            variables.restore_gradient_sums(self._strategy, accumulation.waiting, waiting)

    def before_training(self, saved: Snapshot) -> None:
        """Makes callbacks that write files append to them."""
        truncate_files(self._callbacks, saved.state["callbacks"])

    def restore_callbacks(self, saved: Snapshot) -> None:
        """Restores the attributes of callbacks."""
        restore_states(self._callbacks, saved.state["callbacks"])

    def restore_data(self, states: Sequence[dict[str, Any]]) -> None:
        """Makes the next epoch start at the resume position of the data."""
        if self._validation is not None and len(states) > len(self._all_handlers()):
            self._validation.handler()
        for handler, state in zip(self._all_handlers(), states, strict=False):
            handler.restore(state)

    def _all_handlers(self) -> list[DataHandler]:
        """Returns each data handler once, always in the same order."""
        validation = self._validation.handlers if self._validation else []
        return list(dict.fromkeys([*self._handlers.all(), *validation]))
