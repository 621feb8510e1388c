"""Soak test: many fits, saves and restores in one process, with the growth of its resources."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

from tests.studies.faults import training
from tfdist.checkpoint.settings import Checkpoints
from tfdist.trainer import Trainer


def run(seconds: float, folder: Path, strategy: str = "mirrored") -> dict[str, Any]:
    """Trains repeatedly, each time resuming from a checkpoint after half of the training.

    Returns:
        The number of rounds, and for each resource its last value and its slope per round over the
        second half of the rounds.
    """
    process, rows = psutil.Process(), []
    trainer = Trainer(lambda: training.build(True), strategy, **training.OPTIONS[strategy])
    end = time.monotonic() + seconds
    data = {"x": training.ROWS, "y": training.NUMBERS, "batch_size": 2, "verbose": 0}
    steps = 0
    while time.monotonic() < end:
        place = folder / "soak"
        for epochs in (1, 2):  # the second resumes from the first
            trainer.checkpoints = Checkpoints(place, every=8, keep=2)
            trainer.last_fit.number = 0  # counts as the same fit again
            trainer.fit(**data, epochs=epochs, validation_data=(training.ROWS, training.NUMBERS))
            steps += training.NUM_ROWS // 2
        shutil.rmtree(place)
        gc.collect()
        rows.append([
            process.memory_info().rss / 2**20, process.num_fds(),
            threading.active_count(), len(list(Path("/proc/self/task").iterdir())),
        ])  # fmt: skip
    late = np.asarray(rows[len(rows) // 2 :])
    slopes = np.polyfit(np.arange(len(late)), late, 1)[0]
    names = ("memory, MB", "open files", "Python threads", "threads")
    keras.backend.clear_session()
    return {
        "strategy": strategy,
        "rounds": len(rows),
        "steps": steps,
        **{name: round(float(value), 1) for name, value in zip(names, late[-1], strict=True)},
        **{
            f"{name} a round": round(float(slope), 4)
            for name, slope in zip(names, slopes, strict=True)
        },
    }
