"""Code that all benchmarks share: flags, tables, files, and information about the machine.

Importing it imports no TensorFlow.
"""

from __future__ import annotations

import gc
import json as json_format
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

import tfdist
from pipelines.cores import num_bound_cores
from tfdist.console import command, files, tables

K = TypeVar("K")
T = TypeVar("T")

#: Explanation of spreads in tables.
NOTE = "Medians, with quartiles in brackets."


#: The `median` of some measurements, and their quartiles as `low` and `high`.
Spread = dict[str, float]


def add_arguments(
    parser: ArgumentParser,
    *,
    steps: int | None = None,
    rounds: int | None = None,
    table: bool = False,
    chart: bool = False,
) -> None:
    """Adds the flags of a benchmark's files, `--smoke`, `--steps` and `--rounds`."""
    if steps is not None:
        parser.add_argument(
            "--steps", type=PositiveInt, default=steps, metavar="N", help="steps of a measurement"
        )
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=PositiveInt, default=rounds, metavar="N",
            help="measurements per variant; the variants run in turns",
        )  # fmt: skip
    parser.add_argument("--json", metavar="FILE.json", help="write all results to this file")
    if table:
        parser.add_argument(
            "--table", metavar="FILE", help="write the table to this .md or .csv file"
        )
    if chart:
        parser.add_argument("--chart", metavar="FILE.png", help="plot the results to this file")
    parser.add_argument(
        "--smoke", action="store_true", help="use tiny sizes, to check that the benchmark runs"
    )


def run_one_of(
    commands: Mapping[str, str], program: str, description: str, arguments: Sequence[str] | None
) -> int:
    """Runs the benchmark that a command line names, as `command.run_one_of` does.

    The function `run` of its module takes `output`, an `Output`, instead of the names of files.

    Returns:
        The exit code: 0, 1 after an error, 130 after an interrupt.
    """
    return command.run(
        lambda: command.run_one_of(commands, program, description, arguments, _make_output)
    )


def _make_output(benchmark: str, values: dict[str, Any]) -> None:
    """Replaces the values of `--json`, `--table` and `--chart`, if it has them, by an `Output`."""
    if "json" in values:
        paths = {flag: values.pop(flag, None) for flag in ("json", "table", "chart")}
        values["output"] = Output(benchmark, **paths)


class Output:
    """Prints the results of a benchmark and writes its files.

    It also measures the processor time of other processes from its creation until `conclude`.

    Raises:
        ConfigurationError: A file cannot be written. This is checked before any measurement.
    """

    def __init__(
        self,
        benchmark: str,
        json: str | None,
        table: str | None,
        chart: str | None,
    ) -> None:
        tables.check_path(json, ".json")
        tables.check_path(table, ".md", ".csv")
        tables.check_path(chart, ".png")
        self._benchmark, self._json, self._table, self._chart = benchmark, json, table, chart
        self._load = OtherLoad()

    def show(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        title: str,
        num_names: int = 1,
    ) -> None:
        """Prints a table, and writes it to the table file, if any."""
        tables.numbers(header, rows, title=title, num_names=num_names)
        if self._table:
            tables.write_file(Path(self._table), header, rows)

    def conclude(
        self,
        results: Any,
        note: str = "",
        paint: Callable[[Any, Any], None] | None = None,
        size: tuple[float, float] = (8, 4.5),
    ) -> None:
        """Prints information about the machine, and writes the results and the chart to files."""
        facts = machine_facts() | {"share_of_other_processes": self._load.fraction()}
        if self._json is not None:
            document = {"benchmark": self._benchmark, "machine": facts, "results": results}
            with files.replacing(Path(self._json)) as temporary:
                temporary.write_text(json_format.dumps(document, indent=1) + "\n")
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        line = (
            f"{facts['processor']}, {facts['cores']} cores, {len(facts['gpus'])} GPUs; {versions}; "
            f"other processes used {facts['share_of_other_processes']:.0%} of the processor."
        )
        tables.text(f"{line}\n{note}" if note else line)
        if self._chart is None or paint is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        paint(figure, results)
        with files.replacing(Path(self._chart)) as temporary:
            figure.savefig(temporary, dpi=100)


def run_in_turns(contenders: Mapping[K, Callable[[], T]], num_rounds: int) -> dict[K, list[T]]:
    """Measures each variant once per round. Each round starts with a different variant.

    Returns:
        The measurements of each variant, in the order of the rounds.
    """
    names = list(contenders)
    samples: dict[K, list[T]] = {name: [] for name in names}
    # A full garbage collection during a measurement would visit all objects of TensorFlow.
    gc.collect()
    gc.freeze()
    for number in range(num_rounds):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            samples[name].append(contenders[name]())
    gc.unfreeze()
    return samples


def spread(values: Sequence[float]) -> Spread:
    """Returns median and quartiles."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"median": median, "low": low, "high": high}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Returns the spread of the ratios of two variants' measurements, round by round."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def as_text(values: Mapping[str, float], form: str = ".2f") -> str:
    """Returns a spread as `median (low-high)`."""
    return f"{values['median']:{form}} ({values['low']:{form}}-{values['high']:{form}})"


def machine_facts() -> dict[str, Any]:
    """Returns processor, memory, accelerators and versions. Initializes TensorFlow."""
    import keras
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return {
        "processor": _processor(),
        "cores": num_bound_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [detail.get("device_name", "unknown") for detail in details],
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "tfdist": tfdist.__version__,
        },
    }


@contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """Restricts this thread, and the threads and processes that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class OtherLoad:
    """Measures the processor time of processes other than this one and its children."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began = time.perf_counter()
        self._all, self._own = _busy_seconds(), self._own_seconds()

    def fraction(self) -> float:
        """Returns the fraction of all cores' time that other processes used since the start."""
        seconds = time.perf_counter() - self._began
        others = (_busy_seconds() - self._all) - (self._own_seconds() - self._own)
        return round(min(1.0, max(0.0, others / (seconds * (psutil.cpu_count() or 1)))), 3)

    def _own_seconds(self) -> float:
        processes = [self._process, *self._process.children(recursive=True)]
        # `cpu_times` of a process includes its ended children.
        return sum(sum(process.cpu_times()[:4]) for process in processes)


def _busy_seconds() -> float:
    """Returns the total non-idle seconds of all cores since boot."""
    times = psutil.cpu_times()
    # `user` includes the time of guests. `steal` is the time of other virtual machines.
    others = ("iowait", "guest", "guest_nice")  # of Linux
    return sum(times) - times.idle - sum(getattr(times, name, 0.0) for name in others)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
