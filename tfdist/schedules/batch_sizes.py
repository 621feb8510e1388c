"""Batches that grow over the first epochs, and how many steps that makes."""

from __future__ import annotations

from tfdist.config import TrainConfig


def batch_sizes(config: TrainConfig) -> int | dict[int, int]:
    """The global batch, or sizes by the epoch from which on they hold, for `Trainer.fit`."""
    sizes, epoch = {}, 0
    for stage in config.batch_warmup or ():
        size, _, epochs = stage.partition(":")
        sizes[epoch] = int(size)
        epoch += int(epochs)
    return {**sizes, epoch: config.batch_size} if sizes else config.batch_size


def steps_until(config: TrainConfig, steps_per_epoch: int, epoch: float) -> int:
    """The optimizer steps before a moment of the training.

    Args:
        config: Has the sizes of the batches.
        steps_per_epoch: With `config.batch_size`. Smaller batches are counted as if the last of
            these were full.
        epoch: The moment, in epochs from the beginning.
    """
    sizes = batch_sizes(config)
    if isinstance(sizes, int):
        return round(epoch * steps_per_epoch)
    rows, steps, ends = steps_per_epoch * config.batch_size, 0.0, [*sizes, float("inf")][1:]
    for (begin, size), end in zip(sizes.items(), ends, strict=True):
        steps += max(0.0, min(epoch, end) - begin) * -(-rows // size)
    return round(steps)
