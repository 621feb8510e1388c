"""One run: a small network on the digits, in some batch, with the rate set in some way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

from tfdist import models, optimizers, schedules
from tfdist.bench.large_batch.ways import WAYS
from tfdist.config import TrainConfig
from tfdist.run import recipe
from tfdist.trainer import Trainer

#: Where the rate falls to a tenth, as fractions of the training: 30, 60 and 80 of 90 epochs.
_DECAYS = (1 / 3, 2 / 3, 8 / 9)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all runs have in common.

    Attributes:
        reference_batch: For which the learning rate is meant.
        learning_rate: Of that batch.
        epochs: Passes over the data, the same for every batch.
        data_dir: Cache folder of the digits.
    """

    reference_batch: int
    learning_rate: float
    epochs: int
    data_dir: str

    def config(self, way: str, batch_size: int, seed: int) -> TrainConfig:
        """Returns the configuration of a run; a warm-up begins at the reference's rate."""
        fields = dict(WAYS[way])
        if warmup := fields.get("warmup_epochs"):
            warmup = min(warmup, 0.2 * self.epochs)
            fields |= {"warmup_epochs": warmup, "warmup_start": self.learning_rate}
        return TrainConfig(
            batch_size=batch_size, seed=seed, epochs=self.epochs, data_dir=self.data_dir,
            optimizer="sgd", learning_rate=self.learning_rate, weight_decay=1e-4,
            lr_reference_batch=self.reference_batch, lr_rule="step",
            lr_decay_epochs=[self.epochs * fraction for fraction in _DECAYS], **fields,
        )  # fmt: skip


def of_way(
    plan: Plan, way: str, batches: Sequence[int], seeds: int, known: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the runs of a way.

    Args:
        plan: Of all.
        way: Which.
        batches: Global batches.
        seeds: Runs of each.
        known: Runs that were made before. At the reference batch all ways are the same, so that one
            of another way will do.
    """
    same = {own["seed"]: own for own in known if own["batch_size"] == plan.reference_batch}
    return [
        same[seed] | {"way": way}
        if batch == plan.reference_batch and seed in same
        else trained(plan, way, batch, seed)
        for batch in batches
        for seed in range(seeds)
    ]


def trained(plan: Plan, way: str, batch_size: int, seed: int) -> dict[str, Any]:
    """Trains once on one device.

    Returns:
        `way`, `batch_size`, `seed`, `learning_rate` (the highest), `steps`, and after the last
        epoch `loss` and the `val_accuracy` on the held-out images; a loss that is no number
        (divergence) is None.
    """
    config = plan.config(way, batch_size, seed)
    digits = recipe.find("digits")
    keras.utils.set_random_seed(seed)
    data = digits.train_data(config)
    steps = recipe.num_steps(data)
    trainer = Trainer(lambda: _model(config, steps), "one_device")
    history = trainer.fit(
        data, epochs=plan.epochs, validation_data=digits.validation_data(config),
        validation_freq=plan.epochs, verbose=0,
    ).history  # fmt: skip
    loss = history["loss"][-1]
    return {
        "way": way,
        "batch_size": batch_size,
        "seed": seed,
        "learning_rate": schedules.peak(config),
        "steps": int(trainer.model.optimizer.iterations),
        "loss": loss if math.isfinite(loss) else None,
        "val_accuracy": history["val_accuracy"][-1],
    }


def _model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Rescaling(1 / 16), models.mlp((8, 8, 1), 10)]
    )
    model.compile(
        optimizers.create(config, schedules.learning_rate(config, steps_per_epoch)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
