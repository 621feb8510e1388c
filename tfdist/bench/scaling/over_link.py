"""Whether gradients cross a link while the backward pass goes on: two hosts and a slowed wire.

The hosts are network namespaces of this machine. A step that computes and sends in turns takes the
sum of both; one that sends meanwhile takes the longer of the two, and the last bucket.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tfdist.bench.interleave import spread, take_turns
from tfdist.bench.step.workloads import Workload
from tfdist.bench.two_hosts import HOSTS, NotAllowedError, TwoHosts, two_hosts
from tfdist.console import sizes
from tfdist.errors import DeviceError, LaunchError

#: What is measured; the last two are steps.
COMPUTE, SEND, AT_ONCE, IN_BUCKETS = "compute", "send", "at once", "in buckets"
#: Strategies by the names of the engines.
STRATEGIES = {"multi_worker": "multi_worker", "Horovod, Gloo": "horovod"}
#: Eight layers alike, of 8 million weights together: their gradients are there one by one.
NETWORK = Workload("mlp", {"units": (1024,) * 8}, (1024,), "float32", 256, 4)
#: What a step in buckets may take, to the longer of computing and sending and the last bucket.
GOAL = 1.15
_SMALL = 32


def measured(link: str, engines: Sequence[str], rounds: int, smoke: bool) -> list[dict[str, Any]]:
    """Returns what computing, sending and steps take, by engine.

    Args:
        link: Rate, and after a comma the delay in each direction: `1Gb,0.1ms`.
        engines: Out of `STRATEGIES`.
        rounds: How often to measure each, in turns.
        smoke: Whether a small batch does.

    Raises:
        DeviceError: No hosts can be made here, or no such link.
        ConfigurationError: That is no rate.
        LaunchError: A worker failed.
    """
    rate, _, delay = link.partition(",")
    # As `tc` writes them, too.
    rate = rate.replace("gbit", "Gbit").replace("mbit", "Mbit")
    bytes_per_second = sizes.bytes_per_second(rate)
    try:
        with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
            hosts.slow(bytes_per_second, delay)
            batch_size = _SMALL if smoke else NETWORK.batch_size
            return [_of_engine(hosts, engine, rounds, batch_size) for engine in engines]
    except NotAllowedError as error:
        raise DeviceError(
            f"--link {link}: this machine does not let us make two hosts with such a link between "
            f"them ({error}): run it as root, where ip and tc are installed; a delay needs netem, "
            "without which the rate alone may do."
        ) from error


def _of_engine(hosts: TwoHosts, engine: str, rounds: int, batch_size: int) -> dict[str, Any]:
    places = ",".join(f"{hosts.addresses[host]}:{5000 + i}" for i, host in enumerate(HOSTS))
    strategy = STRATEGIES[engine]
    arguments = [[strategy, str(rank), places, str(batch_size)] for rank in range(len(HOSTS))]
    with _started(hosts, arguments) as workers:
        facts = json.loads(workers.lines()[0])
        asked = {
            name: functools.partial(workers.slowest, name)
            for name in (COMPUTE, SEND, AT_ONCE, IN_BUCKETS)
        }
        return judged(engine, facts, take_turns(asked, rounds))


def judged(engine: str, facts: dict[str, Any], times: dict[str, list[float]]) -> dict[str, Any]:
    """Returns times and their ratios, round by round.

    Args:
        engine: Its name.
        facts: What there is to send.
        times: Milliseconds by what was measured.
    """
    rounds = zip(*(times[name] for name in (COMPUTE, SEND, AT_ONCE, IN_BUCKETS)), strict=True)
    ratios = []
    for compute, send, at_once, in_buckets in rounds:
        longer = max(compute, send) + facts["last_bucket"] * send
        ratios.append((at_once / (compute + send), in_buckets / longer, in_buckets / at_once))
    to_sum, to_longer, to_at_once = (spread(one) for one in zip(*ratios, strict=True))
    goal = {"goal": GOAL, "met": to_longer.median <= GOAL}
    return {
        "engine": engine,
        **facts,
        "ms": {name: spread(own)._asdict() for name, own in times.items()},
        "at_once_to_sum": to_sum._asdict(),
        "in_buckets_to_longer": to_longer._asdict() | goal,
        "in_buckets_to_at_once": to_at_once._asdict(),
        "samples_ms": times,
    }


class _Workers:
    """Processes that each answer a line with a line, by rank."""

    def __init__(self, errors: IO[str]) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self._errors = errors

    def slowest(self, name: str) -> float:
        """Has all measure, and returns what the slowest took, in milliseconds."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
        return max(map(float, self.lines()))

    def lines(self) -> list[str]:
        """Returns a line of each."""
        return [self.line(process) for process in self.processes]

    def line(self, process: subprocess.Popen[str]) -> str:
        """Returns a line of one.

        Raises:
            LaunchError: It ended.
        """
        assert process.stdout is not None
        if line := process.stdout.readline():
            return line
        self._errors.seek(0)
        raise LaunchError(f"a worker ended: {self._errors.read()[-2000:]}")


@contextlib.contextmanager
def _started(hosts: TwoHosts, arguments: Sequence[Sequence[str]]) -> Iterator[_Workers]:
    """Starts a worker on each host, one after the other: rank 0 is there for the others to find."""
    command = [sys.executable, "-m", "tfdist.bench.scaling.link_worker"]
    env = {"PYTHONPATH": ":".join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryFile("w+") as errors:
        workers = _Workers(errors)
        try:
            for host, own in zip(HOSTS, arguments, strict=True):
                pipes = {"stdin": subprocess.PIPE, "stderr": errors}
                process = hosts.start(host, [*command, *own], env, **pipes)
                workers.processes.append(process)
                workers.line(process)
            yield workers
        finally:
            hosts.end_all()
            for process in workers.processes:
                process.wait()
