"""A Horovod script, one process per GPU: the six changes that Horovod makes to a Keras script.

The digits of scikit-learn (1,797 images of 8x8), a network of two layers, SGD with momentum.
Without flags, this file runs the steps of the strategy explicitly; with flags, it is the training
command.

Command:  mpirun -np 2 python recipes/horovod_basics.py
          horovodrun --gloo -np 2 python recipes/horovod_basics.py
          mpirun -np 2 python -m tfdist.train --recipe horovod_basics
Hardware: any number of GPUs on any number of hosts; without GPUs, each process uses the CPU
Result:   91 % validation accuracy after 10 epochs: 30 s with two processes on two CPU cores
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import tfdist.horovod as hvd
from recipes._basics import NUM_TRAINING, build_model, train_data, validation_data
from tfdist import train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "strategy": "horovod",
    "epochs": 10,
    "batch_size": 64,
    "learning_rate": 0.1,
}


def run_explicitly() -> None:
    """Trains as in Horovod's examples, where each rank reads its own batches."""
    # 1. Initialize Horovod, which connects the ranks that mpirun started.
    # 2. Pin the GPU: init makes only the GPU of its local rank visible to each rank.
    hvd.init()

    # 3. Scale the learning rate, because a step uses one batch of each rank.
    config = TrainConfig(**{**DEFAULTS, "batch_size": 32, "learning_rate": 0.05 * hvd.size()})

    # Every rank draws its own batches from all images; all ranks draw the same number.
    data = train_data(config.model_copy(update={"seed": hvd.rank()})).repeat()
    steps_per_epoch = NUM_TRAINING // config.batch_size // hvd.size()
    model = build_model(config, steps_per_epoch)

    # 4. Wrap the optimizer: the gradients of all ranks are averaged before they are applied.
    model.compile(hvd.DistributedOptimizer(model.optimizer), model.loss, metrics=["accuracy"])
    callbacks = [
        # 5. Broadcast the initial weights of rank 0 to all ranks.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Average metrics over all ranks, and warm up the scaled learning rate for three epochs.
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(config.learning_rate, warmup_epochs=3),
    ]
    model.fit(
        data,
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs,
        validation_data=validation_data(config),
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )

    # 6. Save on rank 0 only; otherwise all ranks would write the same file at the same time.
    if hvd.rank() == 0:
        model.save("horovod_basics.keras")


if __name__ == "__main__":
    if flags := sys.argv[1:]:
        sys.exit(train.main(["--recipe", __file__, *flags]))
    run_explicitly()
