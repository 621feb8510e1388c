"""`tfdist bench device`: copies, memory bandwidth, a convolution and a matrix product by batch."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentParser

from tfdist.console import tables
from tfdist.tools.bench import harness

DESCRIPTION = "copies to a device, memory bandwidth, a convolution and a matrix product by batch"

_BATCHES = (1, 4, 16, 64, 256)
_COPIED = 64 << 20
#: A layer of a CIFAR network, and one of a transformer.
_PIXELS, _CHANNELS, _UNITS = 32, 64, 1024


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    harness.add_arguments(parser, rounds=5, table=True, chart=True)


def run(rounds: int, output: harness.Output, smoke: bool) -> None:
    """Measures the CPU and each GPU, and prints tables. The arguments are the flags."""
    import tensorflow as tf

    gpus = [f"GPU:{n}" for n in range(len(tf.config.list_physical_devices("GPU")))]
    if not gpus:
        tables.text("There is no GPU: only the CPU is measured.")
    batches, copied = ((1, 4), 1 << 20) if smoke else (_BATCHES, _COPIED)
    results = [one for name in ["CPU:0", *gpus] for one in measure(name, batches, copied, rounds)]
    rows = [
        (one["device"], one["what"], str(one["batch"] or ""), f"{1e3 * one['seconds']:.3g}",
         f"{one['rate']:.4g} {one['unit']}")
        for one in results
    ]  # fmt: skip
    output.show(("device", "operation", "batch", "ms", "rate"), rows, "medians", num_names=2)
    output.conclude(results, paint=_paint)


def measure(
    device: str, batches: tuple[int, ...], copied: int, rounds: int
) -> list[dict[str, Any]]:
    """Returns the median times and rates of the operations on a device."""
    import numpy as np
    import tensorflow as tf

    results: list[dict[str, Any]] = []

    def add(what: str, batch: int, work: float, unit: str, fn: Callable[[], Any]) -> None:
        fn()  # chooses kernels
        seconds = statistics.median(_seconds(fn) for _ in range(rounds))
        results.append({"device": device, "what": what, "batch": batch, "seconds": seconds,
                        "rate": work / seconds / 1e9, "unit": unit})  # fmt: skip

    with tf.device(device):
        host = np.ones(copied // 4, "float32")
        x = tf.identity(host)
        add("copy from NumPy", 0, copied, "GB/s", lambda: tf.identity(tf.constant(host)))
        y = tf.identity(x + 1)
        add("addition", 0, 3 * copied, "GB/s", lambda: x + y)  # reads two tensors, writes one
        kernel = tf.ones((3, 3, _CHANNELS, _CHANNELS))
        matrix = tf.ones((_UNITS, _UNITS))
        for batch in batches:
            image = tf.ones((batch, _PIXELS, _PIXELS, _CHANNELS))
            flops = 2 * batch * _PIXELS**2 * 9 * _CHANNELS**2
            add("convolution 3x3", batch, flops, "GFLOP/s",
                functools.partial(tf.nn.conv2d, image, kernel, 1, "SAME"))  # fmt: skip
            rows = tf.ones((batch, _UNITS))
            add("matrix product", batch, 2 * batch * _UNITS**2, "GFLOP/s",
                functools.partial(tf.matmul, rows, matrix))  # fmt: skip
    return results


def _seconds(fn: Callable[[], Any]) -> float:
    import tensorflow as tf

    began = time.perf_counter()
    tf.reshape(fn(), [-1])[0].numpy()  # waits for the device
    return time.perf_counter() - began


def _paint(figure: Any, results: list[dict[str, Any]]) -> None:
    kinds = dict.fromkeys(one["what"] for one in results if one["batch"])
    for axes, kind in zip(figure.subplots(1, 2), kinds, strict=True):
        for device in dict.fromkeys(one["device"] for one in results):
            of_device = [o for o in results if o["device"] == device and o["what"] == kind]
            axes.plot([o["batch"] for o in of_device], [o["rate"] for o in of_device], "o-",
                      label=device)  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="GFLOP/s", title=kind)
        axes.grid(alpha=0.3)
        axes.legend()
