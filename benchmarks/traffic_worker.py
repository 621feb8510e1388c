"""A process of `benchmarks traffic`: trains, and writes what its host sent in a step to a file.

python -m benchmarks.traffic_worker STRATEGY DEVICES FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist

_UNITS, _LAYERS, _ROWS, _STEPS = 1024, 8, 64, 4
#: Bytes that left the host through its link to the switch (`benchmarks.hosts`).
_SENT = Path("/sys/class/net/wire/statistics/tx_bytes")


def build_model() -> keras.Model:
    """Returns a network of 34 MB."""
    layers = [keras.layers.Dense(_UNITS) for _ in range(_LAYERS)]
    model = keras.Sequential([keras.Input((_UNITS,)), *layers])
    model.compile("sgd", "mse", steps_per_execution=_STEPS)
    return model


def main(strategy: str, num_devices: int, folder: Path) -> None:
    """Trains for two epochs, and counts the bytes of the second."""
    trainer = tfdist.Trainer(build_model, strategy=strategy, devices=num_devices)
    rows = np.zeros([_ROWS * _STEPS, _UNITS], np.float32)

    def sent_after_epoch() -> int:
        trainer.fit(rows, rows, batch_size=_ROWS, verbose=0)
        tfdist.barrier()
        return int(_SENT.read_text())

    before = sent_after_epoch()
    per_step = (sent_after_epoch() - before) / _STEPS
    size = sum(math.prod(v.shape) * 4 for v in trainer.model.trainable_variables)
    answer = {"gradient_bytes": size, "sent_bytes": per_step}
    (folder / f"{tfdist.rank()}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
