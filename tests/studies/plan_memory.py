"""`python -m tests.studies.plan_memory`: predicted memory of a step beside the allocator's peak.

Trains programs of `tests.programs` and tiny models of KerasHub on batches of many rows, with
TensorFlow's allocator for GPUs in place of malloc, and compares its peak with what
`tfdist plan memory` predicts. Prints a table, and draws a picture with `--chart FILE.png`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.programs.programs import PROGRAMS
from tests.support.data import Data
from tfdist.console import tables
from tfdist.errors import TfdistError
from tfdist.memory import zeros
from tfdist.tools.plan.devices import ReplicatedStep

#: Largest predicted bytes of a step, by which the number of rows is chosen: tensors should matter
#: more than what the allocator rounds up, and than the workspace of kernels for convolutions.
_MOST = 1 << 28


class Result(NamedTuple):
    """Predicted and measured bytes of a step on `rows` rows; `refused`: why there are none."""

    name: str
    rows: int
    predicted: int
    measured: int
    refused: str = ""


class Case(NamedTuple):
    """A model with rows of data, as `tfdist plan` gets it."""

    model: str
    build: Callable[[], keras.Model]
    data: Any
    precision: str | None = None

    def batch(self, num_rows: int) -> Any:
        """Returns a batch of zeros."""
        return zeros(self.data, num_rows)


def main() -> None:
    """Compares the programs whose names are given, or every N-th and the models of KerasHub."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.plan_memory")
    parser.add_argument("names", nargs="*", help="programs (default: 30 of all families)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    arguments = parser.parse_args()
    # Read when TensorFlow creates its devices. Operations run in one order, as on a GPU.
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    tf.config.threading.set_inter_op_parallelism_threads(1)
    # The allocator keeps the region of a first large tensor, as a GPU's takes all memory at once.
    tf.raw_ops.Empty(shape=[4 * _MOST // 1024, 1024], dtype=tf.uint8)
    results = []
    for case in _cases(arguments.names):
        results.append(compare(case))
        print(*results[-1], flush=True)
    _show(results, arguments.chart)
    if arguments.json:
        arguments.json.write_text(json.dumps([one._asdict() for one in results], indent=1) + "\n")


def compare(case: Case) -> Result:
    """Returns the prediction for a model, and what its steps take."""
    keras.backend.clear_session()
    gc.collect()
    num_rows = 1
    try:
        step = ReplicatedStep(case, on_cpu=True)
        while step.peak(2 * num_rows) <= _MOST:
            num_rows *= 2
        predicted = step.peak(num_rows)
        variables = step.weights + step.optimizer
    except TfdistError as error:
        return Result(case.model, num_rows, 0, 0, str(error).splitlines()[0])
    del step
    gc.collect()
    trainer = tfdist.Trainer(case.build, steps_per_call=1, verify="off")
    data = _copied_batches(case, num_rows)
    trainer.fit(data, steps_per_epoch=2, verbose=0)
    gc.collect()
    tf.config.experimental.reset_memory_stats("CPU:0")
    trainer.fit(data, steps_per_epoch=3, verbose=0)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    gc.collect()
    # What a step needs beyond what stays: the variables, and the data set in host memory.
    measured = peak - tf.config.experimental.get_memory_info("CPU:0")["current"] + variables
    return Result(case.model, num_rows, predicted, measured)


def _copied_batches(case: Case, num_rows: int) -> tf.data.Dataset:
    """Returns a data set of which each step gets a copy, as a GPU would, and nothing ahead."""
    rows = keras.tree.map_structure(lambda a: np.resize(a, (num_rows, *a.shape[1:])), case.data)
    data = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(rows)).repeat()
    options = tf.data.Options()
    options.autotune.enabled = options.experimental_optimization.inject_prefetch = False
    return data.map(
        lambda *batch: tf.nest.map_structure(lambda tensor: tf.reverse(tensor, [0]), batch)
    ).with_options(options)


def _cases(names: list[str]) -> list[Case]:
    if names:
        return [one for one in [*_of_programs(names), *_of_keras_hub()] if one.model in names]
    usual = [name for name, one in PROGRAMS.items() if not one.only_fit]
    usual = usual[:: len(usual) // 30][:30]
    return [*_of_programs(usual), *_of_keras_hub()]


def _of_programs(names: list[str]) -> list[Case]:
    programs = {name: PROGRAMS[name] for name in names if name in PROGRAMS}
    return [_case(name, one.build, one.data) for name, one in programs.items()]


def _case(name: str, build: Callable[[], keras.Model], data: Data) -> Case:
    """Returns a case in float32, in which users train."""

    def in_float32() -> keras.Model:
        keras.config.set_floatx("float32")
        return build()

    def of_float32(array: Any) -> np.ndarray:
        array = np.asarray(array)
        return array.astype("float32") if array.dtype == "float64" else array

    parts = tuple(part for part in (data.x, data.y, data.sample_weight) if part is not None)
    in_tuples = keras.tree.lists_to_tuples(keras.tree.map_structure(of_float32, parts))
    return Case(name, in_float32, in_tuples)


def _of_keras_hub() -> list[Case]:
    from tests.programs import test_keras_hub as hub

    cases = {
        "hub-gpt2": hub.causal_lm("GPT2", hub.HEADS),
        "hub-gemma": hub.causal_lm("Gemma", hub.GEMMA),
        "hub-mistral": hub.causal_lm("Mistral", hub.GROUPED_HEADS),
        "hub-bert": hub.classifier("Bert", hub.HEADS),
        "hub-roberta-masked": hub.masked_lm("Roberta", hub.HEADS, hub.TOKENS),
    }
    return [_case(name, *one) for name, one in cases.items()]


def _show(results: list[Result], chart: Path | None) -> None:
    """Prints the results, the ones within 15 % counted, and draws them."""
    ran = [one for one in results if not one.refused]
    rows = [
        (one.name, str(one.rows), f"{one.predicted / 1e6:.1f}", f"{one.measured / 1e6:.1f}",
         f"{one.predicted / one.measured:.2f}")
        for one in sorted(ran, key=lambda one: one.predicted / one.measured)
    ]  # fmt: skip
    tables.numbers(("program", "rows", "predicted, MB", "measured, MB", "ratio"), rows)
    close = sum(abs(one.predicted / one.measured - 1) <= 0.15 for one in ran)
    print(f"{close} of {len(ran)} within 15 %, {len(results) - len(ran)} refused")
    if chart:
        from matplotlib.figure import Figure

        axes = (figure := Figure(figsize=(5, 5), layout="constrained")).subplots()
        measured = np.array([one.measured / 1e6 for one in ran])
        axes.fill_between(ends := [measured.min(), measured.max()], [0.85 * e for e in ends],
                          [1.15 * e for e in ends], alpha=0.2, label="within 15 %")  # fmt: skip
        axes.scatter(measured, [one.predicted / 1e6 for one in ran], s=16)
        axes.set(xscale="log", yscale="log", xlabel="measured, MB", ylabel="predicted, MB")
        axes.legend()
        figure.savefig(chart, dpi=100)


if __name__ == "__main__":
    main()
