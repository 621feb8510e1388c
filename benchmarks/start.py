"""`python -m benchmarks start`: processor time and memory of the first `fit`, of one step."""

from __future__ import annotations

import json as json_format
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.tools.bench import harness

if TYPE_CHECKING:
    import keras

DESCRIPTION = (
    "measures processor time and memory of a first fit of one step, compared with plain Keras"
)

CONTENDERS = ("tfdist", "Keras")
#: Global batch size.
BATCH_SIZE = 16
_CLASSES, _LENGTH = 10, 32
_TIMEOUT_SECONDS = 3600
_NOTE = (
    "Medians. 'to first row': time relative to the variant's first row. 'ratio': tfdist's time "
    "relative to this row."
)


def _mlp() -> tuple[keras.Model, Any, Any]:
    from tfdist import models

    return models.mlp((64,), _CLASSES), *_rows((64,))


def _resnet50() -> tuple[keras.Model, Any, Any]:
    from tfdist import models

    return models.resnet50((32, 32, 3), _CLASSES), *_rows((32, 32, 3))


def _transformer() -> tuple[keras.Model, Any, Any]:
    """Returns a transformer with twelve blocks, as the smallest GPT-2, but narrow and fast."""
    from tfdist.models.builders import gpt

    gpt.SIZES["benchmark"] = (12, 64, 4)
    tokens = np.random.default_rng(0).integers(0, 256, (BATCH_SIZE, _LENGTH + 1))
    model = gpt.gpt(256, _LENGTH, size="benchmark")  # type: ignore[arg-type]
    return model, tokens[:, :-1], tokens[:, 1:]


def _rows(shape: tuple[int, ...]) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.random((BATCH_SIZE, *shape), np.float32), rng.integers(0, _CLASSES, BATCH_SIZE)


#: Functions that return an uncompiled model, inputs and labels.
MODELS: dict[str, Callable[[], tuple[keras.Model, Any, Any]]] = {
    "mlp": _mlp,
    "resnet50": _resnet50,
    "transformer": _transformer,
}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="networks to train"
    )
    parser.add_argument(
        "--replicas", nargs="+", type=PositiveInt, default=[1, 2, 4, 8], metavar="N",
        help="numbers of replicas: 1 for one device, 2 or more for mirrored",
    )  # fmt: skip
    harness.add_arguments(parser, rounds=1)


def run(
    models: Sequence[str], replicas: Sequence[int], rounds: int, output: harness.Output, smoke: bool
) -> None:
    """Measures and prints a table for each model; the arguments are the values of the flags."""
    if smoke:
        models, replicas, rounds = ["mlp"], [1, 2], 1
    results = []
    for model in models:
        results.append(compare(model, replicas, rounds))
        _show(results[-1], output)
    output.conclude(results, _NOTE)


def compare(model: str, replicas: Sequence[int], num_rounds: int) -> dict[str, Any]:
    """Measures each variant and number of replicas in a new process, in turns.

    Args:
        model: One of `MODELS`.
        replicas: Numbers of replicas.
        num_rounds: Processes of each variant and number.

    Returns:
        Results for JSON. `one_ratio` is the time relative to the first number of replicas, and
        `tfdist_ratio` is tfdist's time relative to the variant.
    """
    measurements: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(num_rounds):
        for number in replicas:
            for contender in CONTENDERS:
                measured = _first_fit(contender, model, number)
                measurements.setdefault((number, contender), []).append(measured)

    def seconds(number: int, contender: str) -> list[float]:
        return [sample["cpu_s"] for sample in measurements[number, contender]]

    cases = []
    for (number, contender), samples in measurements.items():
        spreads = {key: harness.spread([sample[key] for sample in samples]) for key in samples[0]}
        times = seconds(number, contender)
        cases.append(
            {"replicas": number, "contender": contender, "samples": samples}
            | spreads
            | {
                "one_ratio": harness.ratio(times, seconds(replicas[0], contender)),
                "tfdist_ratio": harness.ratio(seconds(number, "tfdist"), times),
            }
        )
    return {"model": model, "rounds": num_rounds, "cases": cases}


def _first_fit(contender: str, model: str, number: int) -> dict[str, float]:
    """Measures in a new process, because TensorFlow is faster when it does something again."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_fit", contender, model, str(number)],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=True,
    )
    return json_format.loads(done.stdout.splitlines()[-1])


def _show(result: dict[str, Any], output: harness.Output) -> None:
    rows = []
    for case in result["cases"]:
        medians = {key: value["median"] for key, value in case.items() if isinstance(value, dict)}
        rows.append(
            (
                case["contender"],
                str(case["replicas"]),
                f"{medians['cpu_s']:.1f}",
                f"{medians['trace_cpu_s']:.1f}",
                f"{medians['rest_cpu_s']:.1f}",
                f"{medians['peak_gb']:.2f}",
                f"{medians['one_ratio']:.2f}",
                f"{medians['tfdist_ratio']:.2f}",
            )
        )
    output.show(
        (
            "", "replicas", "CPU s", "tracing", "optimizing and running", "peak GB",
            "to first row", "ratio",
        ),
        rows,
        f"{result['model']}, first fit of one step of {BATCH_SIZE} rows, "
        f"{result['rounds']} rounds",
    )  # fmt: skip
