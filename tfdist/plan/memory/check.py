"""What is planned beside what is measured: networks by optimizers by precisions."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tfdist.console import table_files, tables
from tfdist.plan import real_steps
from tfdist.plan.memory import over_flags
from tfdist.plan.network import Network

#: After the two that make what later ones hold.
_NUM_STEPS = 2
#: How far the plan may be from the measurement.
GOAL = 0.20

#: Networks and batches that two slow cores train in seconds.
NETWORKS = {
    "mlp": (Network("mlp", (784,), 10, settings={"units": (2048, 2048)}), 256),
    "cnn": (Network("cnn", (32, 32, 3), 10), 256),
    "resnet18": (Network("resnet18", (32, 32, 3), 10, settings={"width": 32}), 64),
    "resnet50": (Network("resnet50", (64, 64, 3), 10), 16),
    "vit": (Network("vit", (32, 32, 3), 10, settings={"size": "micro", "patch": 4}), 128),
    "unet": (Network("unet", (64, 64, 3), 4, settings={"filters": 16}), 16),
    "autoencoder": (Network("autoencoder", (32, 32, 1)), 256),
    "gpt": (Network("gpt", (128,), 1000, settings={"size": "mini"}), 16),
}
_HEADER = [
    "network", "optimizer", "precision", "strategy", "batch", "planned MB", "measured MB", "ratio",
]  # fmt: skip
_KEYS = 4
#: Of the strategies that lay a model over several.
_NUM_DEVICES = 2


def run(cases: Sequence[tuple[str, str, str, str]], results: str | None, page: str | None) -> None:
    """Plans and measures cases, and prints all of them.

    Args:
        cases: Network, optimizer, precision and strategy of each; of `sharded X` X is divided.
        results: A CSV file to which each is added as it is measured; None: none.
        page: A Markdown file for the table; None: none.
    """
    rows = _read(results)
    for case in cases:
        if case in rows:
            continue
        rows[case] = _row(*case)
        if results:
            table_files.write(Path(results), _HEADER, rows.values())
    tables.numbers(_HEADER, rows.values(), num_names=_KEYS)
    planned, real = np.array([row[-3:-1] for row in rows.values()], float).T
    ratios = planned / real  # the last column is rounded
    within = int(np.sum(np.abs(ratios - 1) <= GOAL))
    tables.text(f"{within} of {len(ratios)} are within {GOAL:.0%} of what was measured.")
    if page:
        table_files.write(Path(page), _HEADER, rows.values())


def _row(name: str, optimizer: str, precision: str, strategy: str) -> list[str]:
    network, batch = NETWORKS[name]
    network = dataclasses.replace(network, optimizer=optimizer, precision=precision)
    planned = _planned(network, batch, strategy)
    chosen = over_flags.chosen([strategy.partition(" ")[0]]).get(strategy)
    with real_steps.pool() as pool:  # its own: a peak is that of a process
        if chosen is None:
            (sample,) = pool.ask(network, batch, strategy, 1, _NUM_STEPS)
        else:
            (sample,) = pool.ask(
                network, batch, chosen.strategy, _NUM_DEVICES, _NUM_STEPS, chosen.options
            )
    real = sample.peak_bytes
    numbers = (f"{planned / 1e6:.1f}", f"{real / 1e6:.1f}", f"{planned / real:.2f}")
    return [name, optimizer, precision, strategy, str(batch), *numbers]


def _planned(network: Network, batch: int, strategy: str) -> int:
    """Bytes of a step: of all devices together, which have one memory where they are measured."""
    import tensorflow as tf

    from tfdist.plan.memory.devices import Planner
    from tfdist.plan.memory.over_devices import OverDevices
    from tfdist.plan.memory.trace import trace

    chosen = over_flags.chosen([strategy.partition(" ")[0]]).get(strategy)
    cpus = 0 if tf.config.list_physical_devices("GPU") else len(os.sched_getaffinity(0))
    if chosen is None:
        return Planner(trace(network, cpus), 1).on(strategy, batch)[0].total
    over = OverDevices(network, chosen.strategy, _NUM_DEVICES, chosen.options, cpus)
    return over.together(batch)


def _read(path: str | None) -> dict[tuple[str, ...], list[str]]:
    """The rows that a file holds already, by their case."""
    if path is None or not Path(path).exists():
        return {}
    with Path(path).open(newline="") as file:
        _, *rows = csv.reader(file)
    return {tuple(row[:_KEYS]): row for row in rows}
