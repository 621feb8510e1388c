"""What a GPU is given in a training step, without a GPU.

    python -m tests.studies.launches
    python -m tests.studies.launches --jax PYTHON --network resnet50 --precision float32

Counts the operations of a step of ResNet-50 (224 pixels, 128 rows) and of a transformer (8 blocks
of width 512, 32 rows of 128 tokens) as traced for one GPU, without and with the patches that
only change speed. With `--jax`, also the kernels of the step as a program of XLA, by kind, and the
bytes that they read and write. XLA compiles for an H100 by the plug-in of jax, which is no
dependency: `PYTHON` has `jax`, `jax-cuda12-plugin` and `jax-cuda12-pjrt`. The last column is the
processor time in which XLA compiles the step for this host's CPU, with `--cpu`.
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

#: Measured rates of copies in TB/s: the least time of a step is its bytes at this rate.
_RATES = {"H100": 3.0, "H200": 4.3}
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}
_SIZES |= {"u64": 8, "f64": 8}
#: Instructions that launch nothing.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}
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


def traced(build: Any, num_rows: int, precision: str, jit_compile: bool) -> Any:
    """Returns the concrete function of a step on a batch, for a device that poses as a GPU."""

    def build_model() -> keras.Model:
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
        return model

    strategy, steps = OneDevice("CPU:0"), []

    def keep(step: Any, *_: Any, **__: Any) -> Any:
        steps.append(step)
        raise _TracedError

    with gpus_listed(), replaced(strategy.feed, "compile", keep):
        trainer = tfdist.Trainer(build_model, strategy, precision=precision)
        shape = (num_rows, *trainer.model.input_shape[1:])
        x, y = np.ones(shape, trainer.model.inputs[0].dtype), np.zeros(num_rows, "int64")
        with contextlib.suppress(_TracedError):
            trainer.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)

        def step(x: tf.Tensor, y: tf.Tensor) -> Any:
            share = Share(
                num_rows=tf.constant(num_rows), rows=(x, y), first_row=tf.constant(0, tf.int64)
            )
            with strategy.variables.scope():
                return steps[0](tf.constant(num_rows), [share])

        function = tf.function(step, jit_compile=jit_compile, autograph=False)
        return function.get_concrete_function(tf.constant(x), tf.constant(y))


def operations(function: Any) -> int:
    """Returns the number of operations that compute something, in all functions of a graph."""
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    kinds = collections.Counter(node.op for node in nodes)
    free = ("Const", "Identity", "IdentityN", "Placeholder", "ReadVariableOp", "Reshape", "NoOp")
    free += ("If", "StatefulPartitionedCall", "PartitionedCall", "Shape", "StopGradient", "Pack")
    return sum(kinds.values()) - sum(kinds[kind] for kind in free)


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
        path.write_bytes(_hlo(function, "hlo_serialized"))
        script = Path(__file__).with_name("compile_for_h100.py")
        subprocess.run([jax, script, path], check=True, timeout=1200)
        return path.with_suffix(".txt").read_text()


def _hlo(function: Any, stage: str) -> Any:
    specs = tf.nest.flatten(function.structured_input_signature)
    return compiler_ir.from_concrete_function(function, specs)(stage=stage, platform_name="CPU")


def seconds_on_cpu(function: Any) -> float:
    """Returns the processor time in which XLA compiles a function for the CPU."""
    began = time.process_time()
    _hlo(function, "optimized_hlo")
    return time.process_time() - began


def main() -> None:
    """Prints a row for each network and precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jax", help="a Python with jax and its plug-in for CUDA")
    parser.add_argument("--cpu", action="store_true", help="also compile for the CPU")
    parser.add_argument("--network", choices=_NETWORKS, action="append")
    parser.add_argument("--precision", choices=_PRECISIONS, action="append")
    arguments = parser.parse_args()
    tfdist.devices.configure(1)
    titles = ["network", "precision", "operations, TFDIST_FAST=0", "operations"]
    if arguments.jax:
        titles += ["kernels in XLA", "fusions, libraries, copies", "bytes"]
        titles += [f"least time on an {card}" for card in _RATES]
    titles += ["compiled for CPUs in"] if arguments.cpu else []
    rows = []
    chosen = arguments.network or _NETWORKS, arguments.precision or _PRECISIONS
    for name, precision in itertools.product(*chosen):
        network = *_NETWORKS[name], precision
        with mock.patch.dict(os.environ, TFDIST_FAST="0"):
            slow = operations(traced(*network, jit_compile=False))
        row = [name, precision, slow, operations(traced(*network, jit_compile=False))]
        if arguments.jax or arguments.cpu:
            whole = traced(*network, jit_compile=True)
        if arguments.jax:
            number, moved = kernels(compiled(whole, arguments.jax))
            kinds = ", ".join(str(number[kind]) for kind in ("fusion", "library", "copy"))
            row += [number.total(), kinds, f"{moved / 1e9:.1f} GB"]
            row += [f"{moved / rate / 1e9:.1f} ms" for rate in _RATES.values()]
        if arguments.cpu:
            row.append(f"{seconds_on_cpu(whole):.0f} s")
        rows.append([str(value) for value in row])
        print(*row, flush=True)
    tables.numbers(titles, rows, num_names=2)


_NETWORKS = {"resnet50": (resnet50, 128), "transformer": (transformer, 32)}
_PRECISIONS = ("float32", "mixed_float16")

if __name__ == "__main__":
    main()
