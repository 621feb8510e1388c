"""`python -m tests.studies.gpu.worker CHECK`: measures one thing in a fresh process.

Its last line is JSON for `tests.studies.gpu.runner`, and it exits with 1 if the check did not pass.
TensorFlow is imported in the checks: those that start processes must not have started it before.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: Relative difference of losses after a few steps, by precision: kernels round differently.
_TOLERANCES = {"float32": 1e-4, "mixed_float16": 2e-2, "mixed_bfloat16": 5e-2}

#: Accepted ratios of measured to planned memory; the plan excludes the workspaces of kernels.
_MEMORY_RATIO = (0.7, 1.5)


class Outcome(NamedTuple):
    """The outcome of a check.

    Attributes:
        passed: Whether it passed.
        detail: One line for the table.
        figures: Numbers for the JSON file.
    """

    passed: bool
    detail: str
    figures: dict[str, Any]


def main() -> int:
    """Runs the check of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.gpu.worker", description=__doc__)
    parser.add_argument("check", choices=sorted(_CHECKS))
    parser.add_argument("--devices", type=int, required=True, help="number of devices")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--engine", choices=["keras", "tfdist"], default="tfdist")
    parser.add_argument("--precision", choices=list(_TOLERANCES), default="mixed_float16")
    parser.add_argument("--replicas", type=int, default=1)
    chosen = parser.parse_args()
    outcome = _CHECKS[chosen.check](chosen)
    print(json.dumps({"detail": outcome.detail, **outcome.figures}), flush=True)
    return int(not outcome.passed)


def speed(chosen: argparse.Namespace) -> Outcome:
    """Measures images per second of ResNet-50 with images from memory."""
    import keras
    import tensorflow as tf

    import tfdist
    from tfdist import models

    batch, steps, side, classes = (2, 1, 16, 10) if chosen.rehearse else (64, 50, 224, 1000)
    batch *= chosen.replicas
    tfdist.devices.configure(chosen.replicas)

    def build() -> keras.Model:
        builder = models.resnet18 if chosen.rehearse else models.resnet50
        model = builder((side, side, 3), classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Both without XLA, which Keras would use on a GPU by default.
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
        return model

    numbers = np.random.default_rng(0)
    images = numbers.random((batch, side, side, 3), dtype="float32")
    labels = numbers.integers(0, classes, batch)
    data = tf.data.Dataset.from_tensors((images, labels)).repeat()
    clock = _epoch_clock()
    how: dict[str, Any] = {"epochs": 3, "steps_per_epoch": steps, "callbacks": [clock]}
    if chosen.engine == "keras":
        keras.config.set_dtype_policy(chosen.precision)
        build().fit(data, verbose=0, **how)
    else:
        strategy = "mirrored" if chosen.replicas > 1 else "one_device"
        trainer = tfdist.Trainer(
            build, strategy=strategy, devices=chosen.replicas, precision=chosen.precision
        )
        trainer.fit(data, verbose=0, **how)
    rate = batch * steps / clock.seconds[-1]  # the first epoch traces and chooses kernels
    return Outcome(True, f"{rate:.0f} images/s, batch {batch}", {"images_per_second": rate})


def _epoch_clock() -> Any:
    import keras

    class EpochClock(keras.callbacks.Callback):
        """Takes the seconds of each epoch."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.seconds: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seconds.append(time.perf_counter() - self._began)

    return EpochClock()


def precision(chosen: argparse.Namespace) -> Outcome:
    """Compares the losses of all devices with those of plain Keras on one, in each precision."""
    import keras

    import tfdist

    tfdist.devices.configure(chosen.devices)
    strategy = "mirrored" if chosen.devices > 1 else "one_device"
    x, y = _images(48)
    fit: dict[str, Any] = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    differences = {}
    for policy in _TOLERANCES:
        keras.config.set_dtype_policy(policy)
        expected = _small_network().fit(x, y, **fit).history["loss"]
        keras.config.set_dtype_policy("float32")
        trainer = tfdist.Trainer(
            _small_network, strategy=strategy, devices=chosen.devices, precision=policy
        )
        result = trainer.fit(x, y, **fit).history["loss"]
        differences[policy] = float(np.max(np.abs(np.subtract(result, expected) / expected)))
    passed = all(differences[policy] <= limit for policy, limit in _TOLERANCES.items())
    shown = ", ".join(f"{policy} {size:.1g}" for policy, size in differences.items())
    return Outcome(passed, f"losses differ by {shown}", {"differences": differences})


def _images(number: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return numbers.random((number, 16, 16, 3), dtype="float32"), numbers.integers(0, 5, number)


def _small_network(dropout: float = 0.0) -> Any:
    """Returns a compiled network with convolutions."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(5, dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, jit_compile=False)
    return model


def determinism(chosen: argparse.Namespace) -> Outcome:
    """Trains twice in separate processes, and compares the weights bitwise."""
    command = [sys.executable, "-m", "tests.studies.gpu.worker", "fingerprint"]
    command += ["--devices", str(chosen.devices), *(["--rehearse"] if chosen.rehearse else [])]
    results = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            print(done.stderr)
            return Outcome(False, "the training failed", {})
        results.append(json.loads(done.stdout.strip().splitlines()[-1])["detail"])
    equal = results[0] == results[1]
    return Outcome(equal, "equal weights" if equal else "weights differ", {"hashes": results})


def fingerprint(chosen: argparse.Namespace) -> Outcome:
    """Trains deterministically; the detail is a hash of the weights."""
    import tensorflow as tf

    import tfdist

    tfdist.devices.configure(chosen.devices)
    tf.config.experimental.enable_op_determinism()
    trainer = tfdist.Trainer(
        lambda: _small_network(dropout=0.2),
        strategy="mirrored" if chosen.devices > 1 else "one_device",
        devices=chosen.devices,
    )
    x, y = _images(48)
    trainer.fit(x, y, batch_size=16, epochs=2, verbose=0)
    weights = b"".join(np.asarray(weight).tobytes() for weight in trainer.model.get_weights())
    return Outcome(True, hashlib.sha256(weights).hexdigest(), {})


def memory(chosen: argparse.Namespace) -> Outcome:
    """Compares the peak memory of a step with that of `tfdist plan memory`."""
    name, side, classes, batch = ("resnet18", 32, 10, 8)
    if not chosen.rehearse:
        name, side, classes, batch = ("resnet50", 224, 1000, 64)
    batch *= chosen.devices
    strategy = "mirrored" if chosen.devices > 1 else "one_device"
    planned = _planned(name, side, classes, batch, chosen.devices, strategy)

    import keras
    import tensorflow as tf

    import tfdist
    from tfdist import models

    def build() -> keras.Model:
        model = getattr(models, name)((side, side, 3), classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
        return model

    trainer = tfdist.Trainer(build, strategy=strategy, devices=chosen.devices)
    x, y = np.zeros((2 * batch, side, side, 3), "float32"), np.zeros(2 * batch, "int64")
    trainer.fit(x, y, batch_size=batch, verbose=0)  # chooses kernels, which takes memory
    if chosen.rehearse:
        detail = f"planned {planned / 1e9:.2f} GB; TensorFlow counts no memory of CPUs"
        return Outcome(planned > 0, detail, {"planned": planned})
    tf.config.experimental.reset_memory_stats("GPU:0")
    trainer.fit(x, y, batch_size=batch, verbose=0)
    measured = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    low, high = _MEMORY_RATIO
    detail = f"planned {planned / 1e9:.2f} GB, measured {measured / 1e9:.2f} GB"
    figures = {"planned": planned, "measured": measured}
    return Outcome(low < measured / planned < high, detail, figures)


def _planned(name: str, side: int, classes: int, batch: int, devices: int, strategy: str) -> float:
    """Returns the planned bytes of a device, which a separate process computes."""
    from tfdist.console import units

    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "plan.csv")
        command = [sys.executable, "-m", "tfdist.tools.plan", "memory", "--model", name]
        command += ["--input", f"{side},{side},3", "--classes", str(classes)]
        command += ["--batch-size", str(batch), "--devices", str(devices), "--strategy", strategy]
        subprocess.run([*command, "--table", str(table)], check=True, stdout=sys.stderr)
        with table.open() as file:
            return max(units.num_bytes(row["total"]) for row in csv.DictReader(file))


def prefetch(chosen: argparse.Namespace) -> Outcome:
    """Searches for copies of the batch between devices within the loop of the training step."""
    import keras
    import tensorflow as tf
    from keras import layers

    import tfdist
    from tfdist import strategies
    from tfdist.upstream.tensorflow_graphs import graphs_run_by

    tfdist.devices.configure(chosen.devices)
    # On CPUs nothing is copied ahead by default.
    options = {"prefetch_to_device": True} if chosen.rehearse else {}
    strategy = strategies.create("mirrored", chosen.devices, **options)

    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3), dtype="uint8"),
                layers.Rescaling(1 / 255),
                layers.Flatten(),
                layers.Dense(5),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
        return model

    # Nothing but the batch has this type.
    x = np.random.default_rng(0).integers(0, 255, (64, 8, 8, 3)).astype("uint8")
    trainer = tfdist.Trainer(build, strategy=strategy)
    graphs = graphs_run_by(lambda: trainer.fit(x, np.zeros(64, "int64"), batch_size=16, verbose=0))
    copies = [
        f"{node.name} on {node.device.rpartition('device:')[2]}"
        for graph in graphs
        if any(node.op == "NextIteration" for part in graph.partition_graphs for node in part.node)
        for part in graph.partition_graphs
        for node in part.node
        if node.op in ("_Send", "_HostSend") and node.attr["T"].type == tf.uint8.as_datatype_enum
    ]
    print(*copies, sep="\n")
    return Outcome(not copies, f"{len(copies)} copies of the batch in the loop", {})


_CHECKS: dict[str, Callable[[argparse.Namespace], Outcome]] = {
    check.__name__: check
    for check in (speed, precision, determinism, fingerprint, memory, prefetch)
}

if __name__ == "__main__":
    sys.exit(main())
