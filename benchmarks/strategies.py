"""`python -m benchmarks strategies`: one network under every strategy that runs here."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import tables
from tfdist.errors import LaunchError
from tfdist.strategies import STRATEGIES, Declaration
from tfdist.tools.bench import harness
from tfdist.tools.install_horovod import requirements
from tfdist.tools.plan import network as networks

if TYPE_CHECKING:
    from tfdist.tools.plan.step_profile import Sample

DESCRIPTION = "one network under every strategy: examples per second, and where the time goes"

ALONE = "one_device"
_HEADER = ("strategy", "replicas", "examples/s", "efficiency", "compute", "exchange", "data", "MB")
_NOTE = (
    f"{harness.NOTE} 'efficiency': examples per second of a replica, as a part of those of one "
    "device, which on a CPU has all cores that replicas share. 'exchange': the time to sum as many "
    "bytes as the gradients have, as a part of a step. 'data': waiting for data. 'compute': the "
    "rest. The fastest strategy is first."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_arguments(parser)
    parser.add_argument(
        "--batch", type=PositiveInt, default=32, metavar="N", help="per-replica batch size"
    )
    parser.add_argument(
        "--replicas", type=PositiveInt, default=2, metavar="N", help="replicas of each strategy"
    )
    parser.add_argument(
        "--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES),
        metavar="NAME", help="strategies beside one_device (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--one-thread", action="store_true",
        help="each device computes with one thread, so that devices do not share cores, if there "
        "are as many cores as replicas",
    )  # fmt: skip
    harness.add_arguments(parser, steps=5, rounds=3, table=True, chart=True)


def run(
    batch: int,
    replicas: int,
    strategies: Sequence[str],
    one_thread: bool,
    steps: int,
    rounds: int,
    output: harness.Output,
    smoke: bool,
    **network: Any,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    Raises:
        ConfigurationError: A flag has a value that does not fit.
        LaunchError: The training on one device fails.
    """
    chosen = networks.tiny() if smoke else networks.from_flags(**network)
    if smoke:
        batch, steps, rounds = 4, 2, 1
    only = dict.fromkeys([ALONE, *strategies])
    results, absent = measure(chosen, batch, replicas, steps, rounds, list(only), one_thread)
    conclude(f"{chosen.model}, per-replica batch {batch}", results, absent, output)


def measure(
    network: networks.Workload,
    batch: int,
    replicas: int,
    num_steps: int,
    num_rounds: int,
    only: Sequence[str] = tuple(STRATEGIES),
    one_thread: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns a row for each strategy, the fastest first, and why others are not measured.

    Each strategy trains in processes of its own, which take turns.

    Args:
        network: What is trained.
        batch: Per-replica batch size.
        replicas: Replicas of each strategy except one_device.
        num_steps: Steps of a measurement.
        num_rounds: Measurements of each strategy.
        only: Strategies to measure, one_device among them.
        one_thread: Whether each device computes with one thread.

    Raises:
        LaunchError: The training on one device fails.
    """
    absent: dict[str, str] = {}
    ready: dict[str, Callable[[], Sample]] = {}
    with contextlib.ExitStack() as stack:
        for name in only:
            if why := _not_measured(name, STRATEGIES[name]):
                absent[name] = why
                continue
            try:
                ready[name] = _start(name, network, batch, replicas, num_steps, stack, one_thread)
                ready[name]()  # compiles
            except LaunchError as error:
                if name == ALONE:
                    raise
                absent[name] = str(error).strip().splitlines()[-1]
                del ready[name]
        samples = harness.run_in_turns(ready, num_rounds)
    rows = [_row(name, measured, batch, replicas) for name, measured in samples.items()]
    alone = next(row for row in rows if row["strategy"] == ALONE)["examples_per_s"]["median"]
    for row in rows:
        row["efficiency"] = row["examples_per_s"]["median"] / (row["replicas"] * alone)
    return sorted(rows, key=lambda row: -row["examples_per_s"]["median"]), absent


def conclude(
    title: str, results: list[dict[str, Any]], absent: dict[str, str], output: harness.Output
) -> None:
    """Prints the table and what is not measured, and writes the files."""
    output.show(_HEADER, [_cells(row) for row in results], title)
    for name, why in absent.items():
        tables.text(f"{name} is not measured: {why}")
    output.conclude(results, _NOTE, _paint)


def _not_measured(name: str, declared: Declaration) -> str:
    """Returns why a strategy is not measured here, or an empty string."""
    if name == "horovod" and requirements.horovod_version() is None:
        return "it is not installed: tfdist install_horovod"
    return "its workers train asynchronously" if declared.asynchronous else ""


def _start(
    name: str,
    network: networks.Workload,
    batch: int,
    replicas: int,
    num_steps: int,
    stack: contextlib.ExitStack,
    one_thread: bool,
) -> Callable[[], Sample]:
    """Starts the processes of a strategy, and returns what measures its slowest worker."""
    from tfdist.tools.plan import step_profile

    declared = STRATEGIES[name]
    is_joined = not declared.by_horovod or requirements.horovod_version() is not None
    # Several devices run operations at the same time, and a process waits for others in one thread.
    several = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": str(replicas)}
    environ = several if one_thread else {}
    if name == ALONE:
        alone = environ | {"TF_NUM_INTEROP_THREADS": "1"} if one_thread else {}
        pool, devices, number = step_profile.pool(environ=alone), 1, 1
    elif declared.across_processes and declared.min_devices == 1 and is_joined:
        pool, devices = step_profile.pool(replicas, "processes", environ), 1
        number = replicas
    else:
        pool, devices, number = step_profile.pool(environ=environ), replicas, replicas
    stack.enter_context(pool)

    def ask() -> Sample:
        samples = pool.ask(network, batch * number, name, devices, num_steps)
        return max(samples, key=lambda sample: sample.seconds)

    return ask


def _row(name: str, samples: list[Sample], batch: int, replicas: int) -> dict[str, Any]:
    number = 1 if name == ALONE else replicas
    seconds = harness.spread([sample.seconds for sample in samples])
    exchange = statistics.median(sample.exchange for sample in samples)
    data = statistics.median(sample.data for sample in samples)
    return {
        "strategy": name,
        "replicas": number,
        "ms": harness.spread([1e3 * sample.seconds for sample in samples]),
        "examples_per_s": harness.spread([batch * number / s.seconds for s in samples]),
        "exchange": min(1.0, exchange / seconds["median"]),
        "data": data / seconds["median"],
        "peak_mb": max(sample.peak_bytes for sample in samples) / 1e6,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    speed = harness.as_text(row["examples_per_s"], ".0f")
    compute = 1 - row["exchange"] - row["data"]
    parts = [f"{one:.0%}" for one in (row["efficiency"], compute, row["exchange"], row["data"])]
    return [row["strategy"], str(row["replicas"]), speed, *parts, f"{row['peak_mb']:.0f}"]


def _paint(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draws the examples per second of each strategy."""
    axes = figure.subplots()
    medians = [row["examples_per_s"]["median"] for row in results]
    low = [row["examples_per_s"]["median"] - row["examples_per_s"]["low"] for row in results]
    high = [row["examples_per_s"]["high"] - row["examples_per_s"]["median"] for row in results]
    places = range(len(results))
    axes.barh(places, medians, xerr=[low, high], capsize=3)
    axes.set_yticks(places, [row["strategy"] for row in results])
    axes.invert_yaxis()
    axes.set(xlabel="examples per second")
