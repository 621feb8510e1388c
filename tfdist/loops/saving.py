"""What a training tells whoever saves it; here nobody does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras

from tfdist.checkpoint.store import Place
from tfdist.loops.observers import Observer
from tfdist.strategies.inner_loop import Logs


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


class Saving(Observer):
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
