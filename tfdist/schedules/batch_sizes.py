"""Batch sizes that grow over the first epochs, and the resulting number of steps."""

from __future__ import annotations

from tfdist.config import TrainConfig


def batch_sizes(config: TrainConfig) -> int | dict[int, int]:
    """Returns the global batch size, or sizes by first epoch (from 0), for `Trainer.fit`.

    Example:
        >>> from tfdist.config import TrainConfig
        >>> schedules.batch_sizes(TrainConfig(batch_size=256, batch_warmup=["64:2", "128:2"]))
        {0: 64, 2: 128, 4: 256}
    """
    sizes, epoch = {}, 0
    for stage in config.batch_warmup or ():
        size, _, epochs = stage.partition(":")
        sizes[epoch] = int(size)
        epoch += int(epochs)
    return {**sizes, epoch: config.batch_size} if sizes else config.batch_size


def steps_until(config: TrainConfig, steps_per_epoch: int, epoch: float) -> int:
    """Returns the number of optimizer steps up to a point in training.

    Args:
        config: Configuration of the batch sizes.
        steps_per_epoch: Steps per epoch with `config.batch_size`. The number of steps with smaller
            batches is computed as if the last batch of the epoch were full.
        epoch: The point, in epochs since the start; may be fractional.
    """
    sizes = batch_sizes(config)
    if isinstance(sizes, int):
        return round(epoch * steps_per_epoch)
    rows, steps, ends = steps_per_epoch * config.batch_size, 0.0, [*sizes, float("inf")][1:]
    for (begin, size), end in zip(sizes.items(), ends, strict=True):
        steps += max(0.0, min(epoch, end) - begin) * -(-rows // size)
    return round(steps)
