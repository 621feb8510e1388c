"""Several workers on one host or many: each has a replica, and gradients are all-reduced.

The digits of scikit-learn (1,797 images of 8x8), a network of two layers, SGD with momentum.
Without flags, this file runs the steps of the strategy explicitly; with flags, it is the training
command.

Command:  python -m tfdist.launch --num-workers 2 -- python recipes/multi_worker_basics.py
          python -m tfdist.launch --num-workers 2 --recipe multi_worker_basics
          TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker",
          "index": 0}}' python recipes/multi_worker_basics.py         # on a; on b with index 1
Hardware: hosts that can connect to each other, with the same GPUs. Processes on one host share its
          GPUs, and each needs at least one; without GPUs, any number of processes.
Result:   90.83 % validation accuracy after 10 epochs, all results equal to mirrored_basics: 20 s
          with two processes on two CPU cores
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import keras

import tfdist
from recipes._basics import build_model, train_data, validation_data
from tfdist import train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "strategy": "multi_worker",
    "epochs": 10,
    "batch_size": 64,
    "learning_rate": 0.1,
}


def run_explicitly() -> None:
    """Does step by step what `--strategy multi_worker` does; every worker runs all of it."""
    # 1. TF_CONFIG, which the launcher sets, lists the workers and the rank of this one. They
    #    connect here, before anything else that uses TensorFlow.
    strategy = tfdist.strategies.create("multi_worker")
    print(f"rank {tfdist.rank()} of {tfdist.size()}, {strategy.num_replicas} replicas")

    # 2. The global batch is split over all workers, and scaled with their number.
    config = TrainConfig(
        **{**DEFAULTS, "batch_size": 32 * strategy.num_replicas},
        lr_scaling="linear",
        lr_reference_batch=64,
    )
    keras.utils.set_random_seed(config.seed)

    # 3. Every worker creates the same data set, shuffled with the same seed, and uses its rows of
    #    each batch. The workers check during training that their batches are the same.
    data, held_out = train_data(config), validation_data(config)

    # 4. Model and optimizer are created in the strategy's scope, with the initial values of rank 0.
    trainer = tfdist.Trainer(lambda: build_model(config, len(data)), strategy)

    # 5. Each step all-reduces the gradients with TensorFlow's collectives and applies the same
    #    update everywhere. Logs cover all rows, so callbacks decide the same on every worker.
    trainer.fit(
        data,
        epochs=config.epochs,
        validation_data=held_out,
        verbose=2 if tfdist.is_chief() else 0,
    )

    # 6. Only the chief writes, because the weights of all workers are bitwise identical.
    if tfdist.is_chief():
        trainer.model.save("multi_worker_basics.keras")


if __name__ == "__main__":
    if flags := sys.argv[1:]:
        sys.exit(train.main(["--recipe", __file__, *flags]))
    run_explicitly()
