"""Measures one number format."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from tfdist.plan import step_profile
from tfdist.plan.network import Network
from tfdist.run import flags, from_config, recipe


def of(network: Network, precision: str, batch: int, num_steps: int) -> dict[str, Any]:
    """Returns time and memory of a step, measured in a process of its own.

    Raises:
        LaunchError: It fails.
    """
    with step_profile.pool() as pool:
        one = dataclasses.replace(network, precision=precision)
        (sample,) = pool.ask(one, batch, "one_device", 1, num_steps)
    return {
        "precision": precision,
        "device": sample.device,
        "ms": 1e3 * sample.seconds,
        "examples_per_s": batch / sample.seconds,
        "peak_mb": sample.peak_bytes / 1e6,
    }


def accuracy(precision: str, epochs: int, data_dir: str) -> dict[str, Any]:
    """Returns loss and accuracy on the held-out digits, after a training in this format."""
    asked = ["--precision", precision, "--epochs", str(epochs), "--data-dir", data_dir]
    config = flags.parse("python -m tfdist.train", "", ["--recipe", "digits", *asked])
    workload = recipe.find(config.recipe)
    keras.utils.set_random_seed(config.seed)
    strategy = from_config.make_strategy(config)
    data, validation = from_config.make_data(config, workload, strategy)
    trainer = from_config.make_trainer(config, workload, strategy, recipe.num_steps(data))
    history = trainer.fit(
        data, validation_data=validation, epochs=epochs, verbose=0, shuffle=False
    ).history
    return {name: history[name][-1] for name in ("val_loss", "val_accuracy")}
