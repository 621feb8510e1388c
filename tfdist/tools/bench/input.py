"""`tfdist bench input`: images per second of the input pipeline."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.config import default_data_dir
from tfdist.console import tables
from tfdist.tools.bench import harness

if TYPE_CHECKING:
    from tfdist.tools.bench.input_readers import Reader
    from tfdist.tools.bench.photographs import Photographs

DESCRIPTION = (
    "measures images per second of the input pipeline, compared with decoding only and others"
)

#: Goals: minimum ratio of pipelines to decoding only, and of packed pipelines to other readers.
LIMIT_GOAL, OTHERS_GOAL = 0.95, 1.5
_WARM_UP_STEPS = 3  # until worker processes run and buffers are full


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--num-images",
        type=PositiveInt,
        default=5000,
        metavar="N",
        help="number of JPEGs to generate and read",
    )
    parser.add_argument(
        "--data-dir", default=default_data_dir(), metavar="DIR",
        help="folder for the generated images",
    )  # fmt: skip
    parser.add_argument(
        "--large", action="store_true", help="use photographs of 2000x1500 pixels, not 500x375"
    )
    parser.add_argument(
        "--with-model", action="store_true",
        help="instead, measure how long a model on one core waits for an input pipeline on another",
    )  # fmt: skip
    harness.add_arguments(parser, rounds=5)


def run(
    num_images: int,
    data_dir: str,
    large: bool,
    with_model: bool,
    rounds: int,
    output: harness.Output,
    smoke: bool,
    more_readers: Mapping[str, Reader] | None = None,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    Raises:
        DeviceError: There are fewer than two cores to separate model and input.
    """
    from tfdist.tools.bench import input_readers, photographs

    if smoke:
        num_images, rounds = 96, 1
    images = photographs.create(Path(data_dir) / "bench", num_images, large)
    results: dict[str, Any] = {"images": num_images, "large": large}
    if with_model:
        from tfdist.tools.bench import input_readers

        result = results["with_model"] = input_readers.measure_wait(images)
        tables.text(
            f"Model on one core, input on another: {result['steps']:.0f} steps of "
            f"{result['step_ms']:.0f} ms waited for data for {result['data_wait']:.2%} of the time "
            f"(goal: less than {result['goal']:.0%}). Without the model, the input takes "
            f"{result['batch_ms']:.0f} ms per batch."
        )
    else:
        readers = input_readers.READERS | dict(more_readers or {})
        results |= {"rounds": rounds, "contenders": compare(readers, images, num_images, rounds)}
        size = "2000x1500" if large else "500x375"
        output.show(
            ("", "images/s", "pipelines is faster by", "packed at size", "goal"),
            [(name, *_cells(result)) for name, result in results["contenders"].items()],
            f"{num_images} JPEGs of {size}, cropped to 224x224, batch 64, {rounds} rounds",
        )
    output.conclude(results, _NOTE)


_NOTE = f"{harness.NOTE} Other processes include the worker processes of the contenders."


def compare(
    readers: Mapping[str, Reader], images: Photographs, num_images: int, num_rounds: int
) -> dict[str, dict[str, Any]]:
    """Measures each reader once per round.

    Returns:
        For each reader `images_per_s` (median, low, high) and `samples`; `ratio`, the throughput of
        pipelines with the original images relative to this reader; and `packed_ratio`, the same
        with packed images. The ratio to the limit, and `packed_ratio` to all others, have a `goal`
        and whether it is `met`.
    """
    from tfdist.tools.bench.input_readers import LIMIT, OURS, PACKED

    turns = {
        name: functools.partial(_rate, reader, images, num_images)
        for name, reader in readers.items()
    }
    measured = harness.run_in_turns(turns, num_rounds)
    results: dict[str, dict[str, Any]] = {}
    for name, samples in measured.items():
        results[name] = {"images_per_s": harness.spread(samples), "samples": samples}
        if name == LIMIT:
            results[name]["ratio"] = _with_goal(measured[OURS], samples, LIMIT_GOAL)
        elif name not in (OURS, PACKED):
            results[name]["ratio"] = harness.ratio(measured[OURS], samples)
            results[name]["packed_ratio"] = _with_goal(measured[PACKED], samples, OTHERS_GOAL)
    return results


def _with_goal(ours: list[float], other: list[float], goal: float) -> dict[str, Any]:
    ratio = harness.ratio(ours, other)
    return ratio | {"goal": goal, "met": ratio["median"] >= goal}


def _rate(reader: Reader, images: Photographs, num_images: int) -> float:
    steps = reader(images)
    for _ in range(_WARM_UP_STEPS):
        next(steps)
    count, begin = 0, time.perf_counter()
    while count < num_images:
        count += next(steps)
    return count / (time.perf_counter() - begin)


def _cells(result: dict[str, Any]) -> list[str]:
    ratios = [result.get("ratio"), result.get("packed_ratio")]
    cells = [harness.as_text(one) if one else "" for one in ratios]
    goals = [
        f"{one['goal']:.2f} {'met' if one['met'] else 'missed'}"
        for one in ratios
        if one and "goal" in one
    ]
    return [harness.as_text(result["images_per_s"], ".0f"), *cells, *(goals or [""])]
