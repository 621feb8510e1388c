"""`tfdist bench allreduce`: bandwidth of an all-reduce over two replicas."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.cluster.launcher import mpirun
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.console import tables
from tfdist.console import units as byte_sizes
from tfdist.tools.bench import harness

DESCRIPTION = (
    "measures the bandwidth of an all-reduce over two replicas, compared with a memory copy"
)

REPLICAS = 2
COPY = "memory copy"
#: Bytes of the tensors.
SIZES = [10**3, 10**4, 10**5, 10**6, 4 * 10**6, 16 * 10**6, 64 * 10**6, 256 * 10**6]
_SMOKE_SIZES, _SMOKE_ROUNDS = [10**3, 10**5], 2
#: Minimum bytes per measurement; all-reduces of small tensors are repeated.
_BYTES_PER_ROUND = 1 << 24
_MAX_REPEATS = 32

#: In a worker: takes the number of bytes and of repeats, and returns the median seconds.
Measure = Callable[[int, int], float]
#: Starts the workers of an engine.
Engine = Callable[[], WorkerPool]


def by_tfdist(strategy: str, devices: int) -> Measure:
    """In a worker: returns a function that measures an all-reduce over a strategy's replicas."""
    from tfdist import strategies
    from tfdist.groups.traffic import measure_all_reduce

    created = strategies.create(strategy, devices)
    return lambda num_bytes, repeats: measure_all_reduce(created, num_bytes, repeats)[0]


def _engine(strategy: str, devices: int = 1, **options: Any) -> Engine:
    return lambda: WorkerPool(by_tfdist, strategy, devices, **options)


ENGINES: dict[str, Engine] = {
    "mirrored": _engine("mirrored", REPLICAS, num_workers=1, pauses=True),
    "multi_worker": _engine("multi_worker"),
    "Horovod, MPI": _engine("horovod", via="mpirun", pauses=True),
    "Horovod, Gloo": _engine("horovod"),
}


def missing(engine: str) -> str:
    """Returns why an engine is not available on this machine; empty if it is."""
    if "Horovod" in engine and find_spec("horovod") is None:
        return "Horovod is not installed"
    if "MPI" in engine and mpirun.find() is None:
        return "no MPI is installed"
    if "PyTorch" in engine and find_spec("torch") is None:
        return "PyTorch is not installed"
    return ""


def add_arguments(parser: ArgumentParser, engines: Sequence[str] = tuple(ENGINES)) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--engines", nargs="+", choices=list(engines), default=list(engines), metavar="NAME",
        help=f"one or more of: {'; '.join(engines)}",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", nargs="+", type=PositiveInt, default=SIZES, metavar="BYTES", help="tensor sizes"
    )
    harness.add_arguments(parser, rounds=7, chart=True)


def run(
    engines: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    output: harness.Output,
    smoke: bool,
    known: Mapping[str, Engine] = ENGINES,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    Raises:
        LaunchError: An installed engine cannot be started.
    """
    absent = {name: why for name in engines if (why := missing(name))}
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(known[name]()) for name in engines if name not in absent}
        results = [
            measure(pools, num_bytes, _SMOKE_ROUNDS if smoke else rounds)
            for num_bytes in (_SMOKE_SIZES if smoke else sizes)
        ]
    rows = [
        (byte_sizes.format_bytes(r["bytes"]), *(_cell(*engine) for engine in r["engines"].items()))
        for r in results
    ]
    title = "bus bandwidth in GB/s (as a fraction of a memory copy)"
    output.show(("bytes", *results[0]["engines"]), rows, title, num_names=0)
    for name, why in absent.items():
        tables.text(f"{name} was not measured: {why}.")
    output.conclude(results, paint=_paint, size=(8, 5))


def measure(pools: Mapping[str, WorkerPool], num_bytes: int, num_rounds: int) -> dict[str, Any]:
    """Returns each engine's times, bus bandwidths and ratios to a memory copy for one size."""
    repeats = max(1, min(_MAX_REPEATS, _BYTES_PER_ROUND // num_bytes))
    contenders = {
        name: functools.partial(_slowest, pool, num_bytes, repeats) for name, pool in pools.items()
    }
    contenders[COPY] = functools.partial(_copy, num_bytes, repeats)
    seconds = harness.run_in_turns(contenders, num_rounds)
    engines = {}
    copies = [num_bytes / s / 1e9 for s in seconds[COPY]]
    for name, times in seconds.items():
        # Each replica sends and receives at least 2(n-1)/n of the bytes.
        moved = num_bytes * (1 if name == COPY else 2 * (REPLICAS - 1) / REPLICAS)
        bandwidths = [moved / s / 1e9 for s in times]
        engines[name] = {
            "ms": harness.spread([1e3 * s for s in times]),
            "gb_per_s": harness.spread(bandwidths),
            "of_memory_copy": harness.ratio(bandwidths, copies),
            "samples_s": list(times),
        }
    return {"bytes": num_bytes, "repeats": repeats, "rounds": num_rounds, "engines": engines}


def _slowest(pool: WorkerPool, num_bytes: int, repeats: int) -> float:
    return max(pool.ask(num_bytes, repeats))


def _copy(num_bytes: int, repeats: int) -> float:
    # Not np.zeros, whose pages are allocated only when they are written.
    source, to, times = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8), []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(to, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _cell(name: str, result: dict[str, Any]) -> str:
    bandwidth = f"{result['gb_per_s']['median']:.3g}"
    return bandwidth if name == COPY else f"{bandwidth} ({result['of_memory_copy']['median']:.0%})"


def _paint(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    measured = [result["bytes"] for result in results]
    for name in results[0]["engines"]:
        spreads = [result["engines"][name]["gb_per_s"] for result in results]
        style: dict[str, Any] = {"marker": "o"}
        if name == COPY:
            style = {"color": "gray", "linestyle": "--"}
        (line,) = axes.plot(measured, [s["median"] for s in spreads], label=name, **style)
        low, high = ([s[end] for s in spreads] for end in ("low", "high"))
        axes.fill_between(measured, low, high, color=line.get_color(), alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    axes.set_title("All-reduce over two replicas: medians and quartiles")
    axes.grid(alpha=0.3)
    axes.legend()
