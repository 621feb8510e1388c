"""Learning rate warm-up to the rate for the batches of all ranks."""

from __future__ import annotations

from typing import Any

from tfdist.horovod.callbacks.learning_rate_schedule import LearningRateScheduleCallback
from tfdist.horovod.ranks import rank, size


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate with every batch, from `initial_lr / size()` to `initial_lr`.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> rate = 0.1 * hvd.size()
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2)
        >>> history = build_model().fit(x, y, epochs=2, verbose=0, callbacks=[warmup])

    Args:
        initial_lr: The rate after the warm-up, scaled by the number of ranks.
        warmup_epochs: Number of epochs of the warm-up.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: As in `LearningRateScheduleCallback`.
        verbose: If not 0, rank 0 prints a line at the end of the warm-up.

    Raises:
        ConfigurationError: As in `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warmup_factor,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and rank() == 0 and epoch == self.warmup_epochs - 1:
            rate = float(self._optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished learning rate warm-up to {rate:g}.")

    def _warmup_factor(self, epoch: float) -> float:
        # At the end of the batch, so that the last batch of the warm-up reaches the full rate.
        done = (epoch + 1 / self.steps_per_epoch) / self.warmup_epochs
        return (1 + done * (size() - 1)) / size()
