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
from tests.programs.program import Program
from tests.programs.programs import PROGRAMS
from tfdist.console import tables
from tfdist.errors import TfdistError
from tfdist.memory import zeros
from tfdist.tools.plan.devices import ReplicatedStep

#: Rows of a batch: activations should matter more than what the allocator rounds up.
_ROWS = 4096
#: Bytes above which a program is trained on fewer rows.
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
    parser.add_argument("--rows", type=int, default=_ROWS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    arguments = parser.parse_args()
    # Read when TensorFlow creates its devices. Operations run in one order, as on a GPU.
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    tf.config.threading.set_inter_op_parallelism_threads(1)
    results = []
    for case in _cases(arguments.names):
        results.append(compare(case, arguments.rows))
        print(*results[-1], flush=True)
    _show(results, arguments.chart)
    if arguments.json:
        arguments.json.write_text(json.dumps([one._asdict() for one in results], indent=1) + "\n")


def compare(case: Case, num_rows: int) -> Result:
    """Returns the prediction for a model, and what its steps take."""
    keras.backend.clear_session()
    gc.collect()
    try:
        step = ReplicatedStep(case)
        while step.peak(num_rows) > _MOST:
            num_rows //= 2
        predicted = step.peak(num_rows)
        variables = step.weights + step.optimizer
    except TfdistError as error:
        return Result(case.model, num_rows, 0, 0, str(error).splitlines()[0])
    del step
    gc.collect()
    tiled = keras.tree.map_structure(lambda a: np.resize(a, (num_rows, *a.shape[1:])), case.data)
    data = tf.data.Dataset.from_tensors(tiled).repeat()
    trainer = tfdist.Trainer(case.build, steps_per_call=1, verify="off")
    trainer.fit(data, steps_per_epoch=2, verbose=0)
    gc.collect()
    tf.config.experimental.reset_memory_stats("CPU:0")
    trainer.fit(data, steps_per_epoch=3, verbose=0)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    gc.collect()
    # What a step needs beyond what stays: the variables, and the data set in host memory.
    measured = peak - tf.config.experimental.get_memory_info("CPU:0")["current"] + variables
    return Result(case.model, num_rows, predicted, measured)


def _cases(names: list[str]) -> list[Case]:
    if names:
        return [_case(name, PROGRAMS[name]) for name in names if name in PROGRAMS] + [
            one for one in _of_keras_hub() if one.model in names
        ]
    usual = [name for name, one in PROGRAMS.items() if not one.only_fit]
    usual = usual[:: len(usual) // 30][:30]
    return [_case(name, PROGRAMS[name]) for name in usual] + _of_keras_hub()


def _case(name: str, program: Program) -> Case:
    data = program.data
    parts = [part for part in (data.x, data.y, data.sample_weight) if part is not None]

    def build() -> keras.Model:
        keras.config.set_floatx(program.floatx)
        return program.build()

    return Case(name, build, tuple(keras.tree.map_structure(np.asarray, part) for part in parts))


def _of_keras_hub() -> list[Case]:
    from tests.programs import test_keras_hub as hub

    cases = {
        "hub-gpt2": hub.causal_lm("GPT2", hub.HEADS),
        "hub-gemma": hub.causal_lm("Gemma", hub.GEMMA),
        "hub-mistral": hub.causal_lm("Mistral", hub.GROUPED_HEADS),
        "hub-bert": hub.classifier("Bert", hub.HEADS),
        "hub-roberta-masked": hub.masked_lm("Roberta", hub.HEADS, hub.TOKENS),
    }

    def case(name: str, build: Callable[[], keras.Model], data: Any) -> Case:
        def in_float32() -> keras.Model:
            keras.config.set_floatx("float32")
            return build()

        parts = [part for part in (data.x, data.y, data.sample_weight) if part is not None]
        return Case(name, in_float32, tuple(parts))

    return [case(name, *one) for name, one in cases.items()]


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
