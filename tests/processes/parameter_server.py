"""Any task of a parameter-server cluster. The chief trains until a file exists."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np

import tests  # noqa: F401 - silences TensorFlow
from tests.support.training import build, steps
from tfdist import Trainer
from tfdist.console import command
from tfdist.strategies.parameter_server.strategy import ParameterServer

BATCHES, BATCH_SIZE = 25, 8


def main(stop: Path) -> None:
    """Trains, and prints a JSON line for each epoch and a summary at the end."""
    strategy = ParameterServer()
    trainer = Trainer(lambda: build(metrics=["mae"]), strategy=strategy)
    x = np.random.default_rng(0).normal(size=(BATCHES * BATCH_SIZE, 4)).astype("float32")

    class Report(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            facts = {
                "epoch": epoch,
                "steps": steps(self.model),
                "rows": float(self.model.metrics[0].count.numpy()),
                "overlapping": int(strategy.ledger.staleness()[1:].sum()),
            }
            print(json.dumps(facts), flush=True)
            self.model.stop_training = stop.exists()

    trainer.fit(x, x[:, :1], batch_size=BATCH_SIZE, epochs=10**6, verbose=0, callbacks=[Report()])
    print(json.dumps(strategy.summary()), flush=True)


if __name__ == "__main__":
    sys.exit(command.run(lambda: main(Path(sys.argv[1]))))
