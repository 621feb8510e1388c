"""`python -m benchmarks sequence`: activations of a transformer block in parts on the devices.

Bytes and memory are read from the graph of a training step. They are those of one block: a third of
the difference between networks with four blocks and with one. Times are those of steps of four
blocks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import tables
from tfdist.tools.bench import harness
from tfdist.tools.bench import rounds as turns
from tfdist.tools.plan.network import Network

if TYPE_CHECKING:
    import keras

DESCRIPTION = "bytes, memory and time of tensor parallelism, with activations whole and in parts"

_FEW, _MORE, _HEADS = 1, 4, 4
_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Blocks(Network):
    """Transformer blocks between two layers that are too small to be split.

    Attributes:
        depth: Number of blocks.
    """

    depth: int = 1

    def build(self) -> keras.Model:
        """Returns the compiled model."""
        import keras

        from tfdist.models.builders.transformer import block

        inputs = x = keras.Input(self.input_shape)
        for _ in range(self.depth):
            x = block(x, _HEADS, causal=False, dropout=0.0, epsilon=1e-5, dtype_policy=None)
        pooled = keras.layers.GlobalAveragePooling1D()(x)
        model = keras.Model(inputs, keras.layers.Dense(self.num_classes)(pooled))
        model.compile("sgd", "mse")
        return model

    def batch(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns examples and targets, all zero."""
        shapes = (num_rows, *self.input_shape), (num_rows, self.num_classes)
        return np.zeros(shapes[0], "float32"), np.zeros(shapes[1], "float32")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--devices", type=PositiveInt, default=2, metavar="N", help="number of devices"
    )
    parser.add_argument("--batch", type=PositiveInt, default=64, metavar="N", help="rows")
    parser.add_argument("--length", type=PositiveInt, default=64, metavar="N", help="tokens")
    parser.add_argument("--width", type=PositiveInt, default=64, metavar="N", help="of a token")
    harness.add_arguments(parser, rounds=5, table=True)


def run(
    devices: int,
    batch: int,
    length: int,
    width: int,
    rounds: int,
    output: harness.Output,
    smoke: bool,
) -> None:
    """Prints the tables. The arguments are the values of the flags."""
    batch, length, rounds = (24, 32, 1) if smoke else (batch, length, rounds)
    from tfdist.tools.plan import devices as plans

    plans.make_devices(devices)  # before TensorFlow is initialized
    networks = [Blocks("vit", (length, width), 4, depth=depth) for depth in (_FEW, _MORE)]
    unit = 4 * batch * length * width  # bytes of the float32 input of a block
    one = [plans.ReplicaPlanner(plans.ReplicatedStep(n), "one_device", 1) for n in networks]
    alone = _each([[memory.activations for memory in p.devices(batch)] for p in one], unit)[0]
    rows = [["one device", "", "", f"{alone:.2f}"]]
    for how in ("none", "rows"):
        options = {"split_activations": how}
        planners = [plans.SplitPlanner(n, "tensor_parallel", devices, options) for n in networks]
        received = _each([list(p.bytes_received(batch).values()) for p in planners], unit)
        held = _each([[m.activations for m in p.devices(batch)] for p in planners], unit)
        name = f"--split-activations {how}"
        rows += [
            [name, str(number), f"{in_bytes:.2f}", f"{in_memory:.2f}"]
            for number, (in_bytes, in_memory) in enumerate(zip(received, held, strict=True), 1)
        ]
    exchanged = 8 * (devices - 1) / devices
    gathered = alone / devices + 2 * (1 - 1 / devices)
    rows.append(["formula", "each", f"{exchanged:.2f}", f"{gathered:.2f}"])
    header = ("activations", "device", "received", "memory")
    output.show(header, rows, f"of a block, in inputs of {unit:,} bytes", num_names=2)
    times = _times(networks[1], devices, batch, rounds)
    output.conclude([dict(zip(header, row, strict=True)) for row in rows] + times)


def _times(network: Blocks, devices: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Prints and returns the times of steps."""
    steps = {"one device": _step(network, batch, "one_device", 1)} | {
        f"--split-activations {how}": _step(
            network, batch, "tensor_parallel", devices, split_activations=how
        )
        for how in ("none", "rows")
    }
    samples = turns.run_in_turns(steps, rounds)
    last = [*samples.values()][-1]
    results: list[dict[str, Any]] = [
        {
            "activations": name,
            "ms": turns.spread(own),
            "relative": turns.ratio(last, own),
        }
        for name, own in samples.items()
    ]
    header = ("activations", "ms", "rows relative to this")
    rows = [
        (row["activations"], turns.as_text(row["ms"], ".1f"), turns.as_text(row["relative"]))
        for row in results
    ]
    tables.numbers(header, rows, title=f"a step of {network.depth} blocks")
    return results


def _step(
    network: Blocks, batch: int, strategy: str, devices: int, **options: str
) -> Callable[[], float]:
    """Returns what trains for a few steps, and returns the milliseconds of one."""
    from tfdist import Trainer, strategies

    trainer = Trainer(network.build, strategy=strategies.create(strategy, devices, **options))
    examples, targets = network.batch(batch * _STEPS)

    def measure() -> float:
        began = time.perf_counter()
        trainer.fit(examples, targets, batch_size=batch, verbose=0)
        return 1e3 * (time.perf_counter() - began) / _STEPS

    measure()
    return measure


def _each(found: Sequence[Sequence[int]], unit: int) -> list[float]:
    """Returns the difference of one block on each device, in units."""
    few, more = found
    return [(b - a) / (_MORE - _FEW) / unit for a, b in zip(few, more, strict=True)]
