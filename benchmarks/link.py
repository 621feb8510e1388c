"""`python -m benchmarks link`: whether communication overlaps with the backward pass.

Two hosts are network namespaces of this machine, joined by a link that `tc` slows down. A step that
computes and sends one after the other takes the sum of both; a step that overlaps them takes the
longer of the two, and the time of the last gradient bucket.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser

from benchmarks.hosts import Hosts, NotAllowedError, Workers, make_hosts
from benchmarks.link_protocol import (
    AT_ONCE,
    COMPUTE,
    GRADIENTS,
    IN_BUCKETS,
    NETWORK,
    PARAMETERS,
    SEND,
    Times,
)
from tfdist.console import tables, units
from tfdist.errors import DeviceError
from tfdist.tools.bench import harness
from tfdist.tools.bench.allreduce import missing

DESCRIPTION = "steps of two hosts over slow links (as root): computing, sending and their overlap"

#: The most that a step in buckets may take, as a ratio to the longer of computing and sending plus
#: the last bucket.
GOAL = 1.15
_SMALL, _SMOKE_ROUNDS = 32, 2
#: Headings of the ratios and names of the rows, as on the page about communication.
_RATIOS = {
    "to_longer": "vs. longer phase",
    "to_core": "vs. CPU load",
    "to_at_once": "vs. one bucket",
}
_ROWS = {
    COMPUTE: "compute",
    SEND: "communication",
    AT_ONCE: "one bucket",
    GRADIENTS: "ZeRO 2",
    PARAMETERS: "ZeRO 3",
}
_NOTE = (
    f"{harness.NOTE} Times are those of the slower of two processes of one core each; 'CPU ms' is "
    "the CPU time of all threads. Ratios of the step time: 'vs. longer phase', to the longer of "
    "compute time and communication time plus the time of the last bucket (goal of the step in "
    f"buckets: {GOAL}); 'vs. CPU load', to the same with the CPU time of communication added to "
    "the compute time, since both share a core; 'vs. one bucket', to the step that sends all "
    "gradients in one bucket."
)


class Engine(NamedTuple):
    """The program that runs on each host.

    Attributes:
        module: Module of this package.
        strategy: Its first argument.
        ways: Ways to train.
    """

    module: str
    strategy: str
    ways: tuple[str, ...]


_REPLICATED = (AT_ONCE, IN_BUCKETS)
_SHARDED = (GRADIENTS, PARAMETERS)
ENGINES = {
    "multi_worker": Engine("link_worker", "multi_worker", _REPLICATED),
    "Horovod, Gloo": Engine("link_worker", "horovod", _REPLICATED + _SHARDED),
    "PyTorch, Gloo": Engine("link_torch", "-", _REPLICATED + _SHARDED),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--links", nargs="+", default=["2gbit", "1gbit", "500mbit"], metavar="RATE[,DELAY]",
        help="links to measure, such as 1Gb or 1Gb,0.1ms; a delay needs the kernel's netem",
    )  # fmt: skip
    parser.add_argument(
        "--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="NAME",
        help=f"some of: {'; '.join(ENGINES)}",
    )  # fmt: skip
    harness.add_arguments(parser, rounds=7)


def run(
    links: Sequence[str], engines: Sequence[str], rounds: int, output: harness.Output, smoke: bool
) -> None:
    """Measures and prints a table for each link; the arguments are the values of the flags.

    Raises:
        DeviceError: There is only one core, or no network namespaces can be created.
        ConfigurationError: A rate is malformed.
        LaunchError: A worker failed.
    """
    if len(os.sched_getaffinity(0)) < 2:
        raise DeviceError("this benchmark needs two cores, one for each host; there is one.")
    absent = {name: why for name in engines if (why := missing(name))}
    present = [name for name in engines if name not in absent]
    results = measure(links, present, _SMOKE_ROUNDS if smoke else rounds, smoke)
    for link, same in itertools.groupby(results, lambda result: result["link"]):
        rows = list(same)
        output.show(
            ("library", "variant", "ms", "CPU ms", *_RATIOS.values()),
            [cells for row in rows for cells in _cells(row)],
            f"over {link}, {units.format_bytes(rows[0]['bytes'])} of gradients in "
            f"{rows[0]['buckets']} buckets",
            num_names=2,
        )
    for name, why in absent.items():
        tables.text(f"{name} is not measured: {why}.")
    output.conclude(results, _NOTE)


def measure(
    links: Sequence[str], engines: Sequence[str], num_rounds: int, smoke: bool
) -> list[dict[str, Any]]:
    """Returns the times of computing, sending and steps, by link and engine.

    Args:
        links: The rate of each link, and after a comma the delay in each direction: `1Gb,0.1ms`.
        engines: Names out of `ENGINES`.
        num_rounds: Measurements of each, in turns.
        smoke: Whether to use a small batch.

    Raises:
        DeviceError: The hosts or a link cannot be created here.
        ConfigurationError: A rate is malformed.
        LaunchError: A worker failed.
    """
    rates = {link: _rate(link) for link in links}
    batch_size = _SMALL if smoke else NETWORK.batch_size
    link = links[0]
    try:
        with tempfile.TemporaryDirectory() as folder, make_hosts(Path(folder)) as hosts:
            results = []
            for name in engines:
                hosts.network.slow(*rates[links[0]])
                with _started(hosts, ENGINES[name], batch_size) as workers:
                    facts = {"engine": name} | workers.answers()[0]
                    for link in links:
                        hosts.network.slow(*rates[link])
                        names = (COMPUTE, SEND, *ENGINES[name].ways)
                        ask = {one: functools.partial(_slowest, workers, one) for one in names}
                        samples = harness.run_in_turns(ask, num_rounds)
                        results.append({"link": link} | judge(facts, samples))
    except NotAllowedError as error:
        raise DeviceError(
            f"--links {link}: this machine cannot create two hosts with such a link ({error}). Run "
            "as root, with ip and tc installed. A delay needs the kernel's netem: try the rate "
            "alone."
        ) from error
    return sorted(results, key=lambda result: links.index(result["link"]))


def judge(facts: Mapping[str, Any], samples: Mapping[str, Sequence[Times]]) -> dict[str, Any]:
    """Returns times and the ratios of steps, round by round.

    Args:
        facts: About the gradients.
        samples: Times of the slower worker, by measurement.
    """
    times = {name: [one.ms for one in measured] for name, measured in samples.items()}
    cpu = {name: [one.cpu_ms for one in measured] for name, measured in samples.items()}
    compute, send = times[COMPUTE], times[SEND]
    last = [facts["last_bucket"] * ms for ms in send]
    base = {
        "to_sum": [a + b for a, b in zip(compute, send, strict=True)],
        "to_longer": [max(a, b) + c for a, b, c in zip(compute, send, last, strict=True)],
        "to_core": [
            max(a + d, b) + c for a, b, c, d in zip(compute, send, last, cpu[SEND], strict=True)
        ],
        "to_at_once": times[AT_ONCE],
    }
    steps = {
        name: {to: harness.ratio(measured, base[to]) for to in base}
        for name, measured in times.items()
        if name not in (COMPUTE, SEND)
    }
    goal = steps[IN_BUCKETS]["to_longer"]
    goal |= {"goal": GOAL, "met": goal["median"] <= GOAL}
    return {
        **facts,
        "ms": {name: harness.spread(measured) for name, measured in times.items()},
        "cpu_ms": {name: harness.spread(measured) for name, measured in cpu.items()},
        "steps": steps,
        "samples_ms": times,
    }


def _slowest(workers: Workers, name: str) -> Times:
    """Asks all workers for a measurement, and returns that of the slowest."""
    return max(Times(*answer) for answer in workers.ask(name))


def _rate(link: str) -> tuple[float, str]:
    """Returns the bytes per second of a link, and its delay."""
    rate, _, delay = link.partition(",")
    # `tc` writes the prefixes in lower case.
    rate = rate.replace("gbit", "Gbit").replace("mbit", "Mbit")
    return units.bytes_per_second(rate), delay


@contextlib.contextmanager
def _started(hosts: Hosts, engine: Engine, batch_size: int) -> Iterator[Workers]:
    """Starts a worker on each host, rank 0 first, since the others connect to it."""
    places = ",".join(f"{a}:{5000 + i}" for i, a in enumerate(hosts.addresses.values()))
    with hosts.workers() as workers:
        for rank, host in enumerate(hosts.addresses):
            module, arguments = f"benchmarks.{engine.module}", (str(rank), places, str(batch_size))
            workers.start(host, module, engine.strategy, *arguments)
            workers.read()  # the worker has started
        yield workers


def _cells(row: dict[str, Any]) -> Iterator[list[str]]:
    """Yields a row of the table for each measurement of an engine."""
    for name, spread in row["ms"].items():
        spent = f"{row['cpu_ms'][name]['median']:.0f}"
        ratios = row["steps"].get(name)
        cells = [_ratio(ratios[to]) for to in _RATIOS] if ratios else [""] * len(_RATIOS)
        yield [row["engine"], _ROWS.get(name, name), harness.as_text(spread, ".0f"), spent, *cells]


def _ratio(spread: Mapping[str, Any]) -> str:
    cell = harness.as_text(spread)
    return f"{cell}, goal {'met' if spread['met'] else 'missed'}" if "goal" in spread else cell
