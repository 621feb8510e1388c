"""Counts the files and lines of `tfdist` that one `fit` executes.

    python -m tests.life_of_a_batch --strategy mirrored
    mpirun -np 2 python -m tests.life_of_a_batch --strategy horovod
    python -m tests.life_of_a_batch --check

Trains a small classifier for two epochs of two steps, on two devices per process (one under
`horovod`). Counts every Python function of `tfdist` that runs during `fit`, on all threads.
Construction of the `Trainer` and imports are not counted. `--check` fails if a file runs under
`mirrored` that is neither on the way of a batch, as docs/how_it_works.md describes it, nor a known
leaf.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import keras
import numpy as np

import tfdist

ROOT = str(Path(tfdist.__file__).parent)
#: What a batch passes, in the order of a first reading.
WAY = (
    "trainer.py", "loops/fit.py", "loops/epoch.py", "loops/data_handler.py", "loops/data_order.py",
    "loops/functions.py", "model_setup/build.py", "strategies/base.py", "strategies/mirrored.py",
    "strategies/tf_distribute.py", "strategies/feed.py", "strategies/inner_loop.py",
    "step/step.py", "step/replica_runner.py", "step/forward_backward.py", "step/loss.py",
    "step/state.py", "step/loss_scaling.py", "replica/replica.py", "replica/scope.py",
)  # fmt: skip
#: Files beside it: observers and checks, patches, the row analysis, buckets, and adapters.
LEAVES = (
    "callbacks/", "cluster/remote/", "console/streams.py", "devices.py", "errors.py", "groups/",
    "loops/callbacks.py", "loops/interrupts.py", "loops/model_methods.py", "loops/observers.py",
    "loops/rank_checks.py", "loops/self_check.py",
    "loops/steps_per_call.py", "model_setup/create.py", "patches/", "precision.py",
    "replica/program_state.py", "rows/",
    "step/shared_trace.py", "strategies/batches.py",
    "strategies/mirrored_variables.py", "strategies/variables.py", "upstream/",
)  # fmt: skip


def build_model() -> keras.Model:
    """Returns a compiled classifier with dense, normalization and random layers."""
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


@contextmanager
def recorded_calls() -> Iterator[set[CodeType]]:
    """Collects the code objects of all functions that are called within the block."""
    called = set[CodeType]()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def of_product(called: set[CodeType]) -> dict[str, set[CodeType]]:
    """Groups the called functions of `tfdist` by file, without module bodies."""
    by_file = defaultdict(set)
    for code in called:
        if code.co_filename.startswith(ROOT) and code.co_name != "<module>":
            by_file[code.co_filename[len(ROOT) + 1 :]].add(code)
    return dict(by_file)


def train(trainer: tfdist.Trainer) -> Callable[[], Any]:
    """Returns a function that trains for two epochs of two steps."""
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(32, 8)).astype("float32"), np.arange(32) % 3
    return lambda: trainer.fit(x, y, batch_size=16, epochs=2, verbose=0)


def main(arguments: list[str] | None = None) -> int:
    """Trains once, and prints one line per file and the totals; returns 1 if `--check` fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.life_of_a_batch", description=__doc__)
    parser.add_argument("--strategy", default="mirrored")
    parser.add_argument("--devices", type=int, help="default: 2, and 1 for horovod")
    parser.add_argument("--check", action="store_true", help="fail if another file runs")
    options = parser.parse_args(arguments)
    devices = options.devices or (1 if options.strategy == "horovod" else 2)
    trainer = tfdist.Trainer(build_model, strategy=options.strategy, devices=devices)
    fit = train(trainer)
    with recorded_calls() as called:
        fit()
    if not trainer.strategy.group.is_chief:
        return 0
    in_files = in_functions = 0
    for name, functions in sorted(of_product(called).items()):
        size = len(Path(ROOT, name).read_text().splitlines())
        lines = {line for code in functions for *_, line in code.co_lines() if line}
        in_files, in_functions = in_files + size, in_functions + len(lines)
        print(f"{name:56} {size:5} lines, {len(lines):4} in the functions called")
    num_files = len(of_product(called))
    on_the_way = sum(len(Path(ROOT, name).read_text().splitlines()) for name in WAY)
    print(f"{num_files} files, {in_files} lines, {in_functions} in the functions called")
    print(f"{len(WAY)} of them, with {on_the_way} lines, are on the way of a batch")
    others = [name for name in of_product(called) if not name.startswith((*WAY, *LEAVES))]
    if options.check and others:
        print(f"Not on the way of a batch, and no known leaf: {', '.join(sorted(others))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
