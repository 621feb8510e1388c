"""What a GPU is given in a training step, without a GPU.

    python -m tests.studies.launches --cpu
    python -m tests.studies.launches --jax PYTHON --network resnet50 --precision float32

Counts the operations of a step of ResNet-50 (224 pixels, 128 rows) and of a transformer (8 blocks
of width 512, 32 rows of 128 tokens) as traced for one GPU, and the bytes that they read and write,
without and with the patches that only change speed. With `--jax`, also the kernels of the step as a
program of XLA, by kind, and their bytes. XLA compiles for an H100 by the plug-in of jax, which is
no dependency: `PYTHON` has `jax`, `jax-cuda12-plugin` and `jax-cuda12-pjrt`. With `--cpu`, the time
that the first `fit` of two rows takes on this host's CPU more than the second one, without and with
XLA.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import math
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.eager.polymorphic_function import compiler_ir

import tfdist
from tests.gpu_paths.kernel_coverage import gpus_listed
from tfdist.console import tables
from tfdist.strategies.batches import Share
from tfdist.strategies.one_device import OneDevice
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import function_graph

#: Measured rates of copies in TB/s: the least time of a step is its bytes at this rate.
_RATES = {"H100": 3.0, "H200": 4.3}
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}
_SIZES |= {"u64": 8, "f64": 8}
#: Instructions that launch nothing.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}
#: Operations that compute nothing, or call functions whose operations are counted.
_UNCOUNTED = {"Const", "Identity", "IdentityN", "Placeholder", "ReadVariableOp", "Reshape", "NoOp"}
_UNCOUNTED |= {"If", "StatefulPartitionedCall", "PartitionedCall", "Shape", "StopGradient", "Pack"}
_CALLED = r"(?:to_apply|body|true_computation|false_computation)=%?([\w.\-]+)"


def resnet50() -> keras.Model:
    """Returns the network of `keras.applications`, with a bias before each BatchNorm."""
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


def transformer() -> keras.Model:
    """Returns an encoder with a classifier."""
    ids = keras.Input((128,), dtype="int32")
    h = layers.Embedding(8192, 512)(ids)
    for _ in range(8):
        n = layers.LayerNormalization()(h)
        h = h + layers.Dropout(0.1)(layers.MultiHeadAttention(8, 64, dropout=0.1)(n, n))
        f = layers.Dense(2048, "gelu")(layers.LayerNormalization()(h))
        h = h + layers.Dropout(0.1)(layers.Dense(512)(f))
    return keras.Model(ids, layers.Dense(10)(layers.GlobalAveragePooling1D()(h)))


class _TracedError(Exception):
    """Ends `fit` when its step is known."""


def _trainer(build: Any, precision: str, jit_compile: bool, num_rows: int) -> Any:
    """Returns a trainer on one device, and a batch."""

    def build_model() -> keras.Model:
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
        return model

    trainer = tfdist.Trainer(build_model, OneDevice("CPU:0"), precision=precision)
    shape = (num_rows, *trainer.model.input_shape[1:])
    return trainer, (np.ones(shape, trainer.model.inputs[0].dtype), np.zeros(num_rows, "int64"))


def traced(build: Any, num_rows: int, precision: str, jit_compile: bool) -> Any:
    """Returns the concrete function of a step on a batch, for a device that poses as a GPU."""
    steps = []

    def keep(step: Any, *_: Any, **__: Any) -> Any:
        steps.append(step)
        raise _TracedError

    with gpus_listed():
        trainer, (x, y) = _trainer(build, precision, jit_compile, num_rows)
        strategy = trainer.strategy
        with replaced(strategy.feed, "compile", keep), contextlib.suppress(_TracedError):
            trainer.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)

        def step(x: tf.Tensor, y: tf.Tensor) -> Any:
            share = Share(
                num_rows=tf.constant(num_rows), rows=(x, y), first_row=tf.constant(0, tf.int64)
            )
            with strategy.variables.scope():
                return steps[0](tf.constant(num_rows), [share])

        function = tf.function(step, jit_compile=jit_compile, autograph=False)
        return function.get_concrete_function(tf.constant(x), tf.constant(y))


def operations(graph: Any) -> tuple[int, int]:
    """Returns the number of operations that compute something, in all functions of a graph.

    Also the bytes of their inputs and outputs, as far as shapes are known.
    """
    number = num_bytes = 0
    for operation in graph.get_operations():
        if operation.type not in _UNCOUNTED:
            number += 1
            num_bytes += sum(map(_num_bytes, (*operation.inputs, *operation.outputs)))
        for name, value in operation.node_def.attr.items():
            if value.func.name and (called := function_graph(operation, name)) is not None:
                more, moved = operations(called)
                number, num_bytes = number + more, num_bytes + moved
    return number, num_bytes


def _num_bytes(tensor: tf.Tensor) -> int:
    is_known = tensor.shape.is_fully_defined() and tensor.dtype not in (tf.resource, tf.variant)
    return tensor.shape.num_elements() * tensor.dtype.size if is_known else 0


def kernels(hlo: str) -> tuple[collections.Counter[str], int]:
    """Returns the kernels of an optimized HLO module, counted by kind, and the bytes they move."""
    computations: dict[str, list[str]] = {}
    entry = current = ""
    for line in hlo.splitlines():
        if start := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            current = start[2]
            computations[current] = []
            entry = current if start[1] else entry
        elif " = " in line:
            computations.setdefault(current, []).append(line.strip())

    def size(shape: str) -> int:
        parts = re.findall(rf"\b({'|'.join(_SIZES)})\[([\d,]*)\]", shape)
        return sum(_SIZES[d] * math.prod(int(n) for n in s.split(",") if n) for d, s in parts)

    number: collections.Counter[str] = collections.Counter()

    def visit(name: str) -> int:
        sizes: dict[str, int] = {}
        num_bytes = 0
        for line in computations[name]:
            form = r"(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$"
            if (parsed := re.match(form, line)) is None:
                continue
            result, shape, kind, rest = parsed.groups()
            sizes[result] = size(shape)
            inside = re.findall(_CALLED, rest) if kind in ("call", "while", "conditional") else []
            num_bytes += sum(map(visit, inside))
            if not inside and kind not in _FREE and not kind.endswith("-done"):
                number[kind if kind in ("fusion", "copy") else "library"] += 1
                given = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
                num_bytes += sizes[result] + sum(sizes.get(one, 0) for one in given)
        return num_bytes

    return number, visit(entry)


def compiled(function: Any, jax: str) -> str:
    """Returns the HLO of a function as XLA optimizes it for an H100."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.hlo"
        specs = tf.nest.flatten(function.structured_input_signature)
        to_hlo = compiler_ir.from_concrete_function(function, specs)
        path.write_bytes(to_hlo(stage="hlo_serialized", platform_name="CPU"))
        script = Path(__file__).with_name("compile_for_h100.py")
        subprocess.run([jax, script, path], check=True, timeout=1200)
        return path.with_suffix(".txt").read_text()


def seconds_of_first_fit(build: Any, precision: str, jit_compile: bool) -> tuple[float, float]:
    """Returns the processor time and the wall time that the first `fit` takes more than another."""
    trainer, batch = _trainer(build, precision, jit_compile, 2)
    times = []
    for _ in range(2):
        began = time.process_time(), time.perf_counter()
        trainer.fit(tf.data.Dataset.from_tensors(batch), verbose=0)
        times.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    (cpu, wall), (later_cpu, later_wall) = times
    return cpu - later_cpu, wall - later_wall


def main() -> None:
    """Prints two rows for each network and precision: without and with patches for speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jax", help="a Python with jax and its plug-in for CUDA")
    parser.add_argument("--cpu", action="store_true", help="time first steps, and count nothing")
    parser.add_argument("--network", choices=_NETWORKS, action="append")
    parser.add_argument("--precision", choices=_PRECISIONS, action="append")
    arguments = parser.parse_args()
    tfdist.devices.configure(1)
    names = arguments.network or _NETWORKS, arguments.precision or _PRECISIONS
    rows = []
    for name, precision, is_on in itertools.product(*names, (False, True)):
        build, num_rows = _NETWORKS[name]
        row = [name, precision, str(is_on)]
        if arguments.cpu:
            times = seconds_of_first_fit(build, precision, jit_compile=is_on)
            row += [f"{seconds:.1f} s" for seconds in times]
        else:
            with mock.patch.dict(os.environ, TFDIST_FAST=str(int(is_on))):
                row += _counted(build, num_rows, precision, arguments.jax)
        rows.append(row)
        print(*row, flush=True)
    titles = ["network", "precision", "XLA" if arguments.cpu else "patches"]
    if arguments.cpu:
        titles += ["processor time", "wall time"]
    else:
        titles += ["operations", "bytes", "kernels in XLA", "fusions, libraries, copies", "bytes"]
        titles += [f"least time on an {card}" for card in _RATES]
    tables.numbers(titles[: len(rows[0])], rows, num_names=3)


def _counted(build: Any, num_rows: int, precision: str, jax: str | None) -> list[str]:
    """Returns the cells of a row."""
    number, moved = operations(traced(build, num_rows, precision, jit_compile=False).graph)
    row = [str(number), f"{moved / 1e9:.1f} GB"]
    if jax:
        kinds, moved = kernels(compiled(traced(build, num_rows, precision, jit_compile=True), jax))
        of_kinds = ", ".join(str(kinds[kind]) for kind in ("fusion", "library", "copy"))
        row += [str(kinds.total()), of_kinds, f"{moved / 1e9:.1f} GB"]
        row += [f"{moved / rate / 1e9:.1f} ms" for rate in _RATES.values()]
    return row


_NETWORKS = {"resnet50": (resnet50, 128), "transformer": (transformer, 32)}
_PRECISIONS = ("float32", "mixed_float16")

if __name__ == "__main__":
    main()
