"""A worker in which a fault occurs during training: STRATEGY FAULT RANK."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import keras
import numpy as np

import tests  # noqa: F401 - silences TensorFlow
import tfdist
from tests.support.training import build
from tfdist.console import command

#: The fault of a worker that never reaches the first step.
ASLEEP = "asleep"
#: Watchdog time-out in seconds after compilation.
SECONDS = 6.0


def _fail() -> None:
    raise ValueError("this batch is cursed\nand more about it")


FAULTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "failing": _fail,
    "none": lambda: None,
    ASLEEP: lambda: None,
}


class Fault(keras.callbacks.Callback):
    """Causes a fault on one rank after the second epoch."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()
        self._name, self._rank = name, rank

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        del logs
        if epoch == 1:
            print("training", flush=True)
            if tfdist.rank() == self._rank:
                FAULTS[self._name]()


def main(strategy: str, fault: str, rank: int) -> None:
    """Trains forever unless a fault occurs; reports the number of epochs at the end."""
    is_asleep = fault == ASLEEP
    trainer = tfdist.Trainer(build, strategy, watchdog_seconds=SECONDS if is_asleep else 300.0)
    if is_asleep and tfdist.rank() == rank:
        time.sleep(3600)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    rows = {"x": x, "y": x[:, :1], "batch_size": 8, "shuffle": False, "verbose": 0}
    trainer.fit(**rows)  # compiles, which may take longer than the time-out
    trainer._watchdog.seconds = SECONDS
    try:
        trainer.fit(**rows, epochs=10**6, callbacks=[Fault(fault, rank)])
    finally:
        print(f"left with {len(trainer.model.history.epoch)} epochs", flush=True)


if __name__ == "__main__":
    sys.exit(command.run(lambda: main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
