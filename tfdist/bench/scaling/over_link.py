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
from typing import IO, Any, NamedTuple

from tfdist.bench.hosts import Hosts, NotAllowedError, make_hosts
from tfdist.bench.interleave import take_turns
from tfdist.bench.scaling import link_answers as answers
from tfdist.bench.scaling.link_ratios import judged
from tfdist.bench.step.workloads import Workload
from tfdist.console import sizes
from tfdist.errors import DeviceError, LaunchError


class Engine(NamedTuple):
    """What is started on each host.

    Attributes:
        module: The program, in this package.
        strategy: Its first argument.
        ways: To train, by copies and in parts.
    """

    module: str
    strategy: str
    ways: tuple[str, ...]


_COPIES = (answers.AT_ONCE, answers.IN_BUCKETS)
_PARTS = (answers.GRADIENTS, answers.PARAMETERS)
#: By the names that the benchmark has for them elsewhere.
ENGINES = {
    "multi_worker": Engine("link_worker", "multi_worker", _COPIES),
    "Horovod, Gloo": Engine("link_worker", "horovod", _COPIES + _PARTS),
    "PyTorch, Gloo": Engine("link_torch", "-", _COPIES + _PARTS),
}
#: Eight layers alike, of 8 million weights together: their gradients are there one by one.
NETWORK = Workload("mlp", {"units": (1024,) * 8}, (1024,), "float32", 1024, 4)
_SMALL = 32


def measured(
    links: Sequence[str], engines: Sequence[str], rounds: int, smoke: bool
) -> list[dict[str, Any]]:
    """Returns what computing, sending and steps take, by link and engine.

    Args:
        links: Of each its rate, and after a comma the delay in each direction: `1Gb,0.1ms`.
        engines: Out of `ENGINES`.
        rounds: How often to measure each, in turns.
        smoke: Whether a small batch does.

    Raises:
        DeviceError: No hosts can be made here, or no such link.
        ConfigurationError: That is no rate.
        LaunchError: A worker failed.
    """
    rates = {link: _rate(link) for link in links}
    batch_size = _SMALL if smoke else NETWORK.batch_size
    link = links[0]
    try:
        with tempfile.TemporaryDirectory() as folder, make_hosts(Path(folder)) as hosts:
            results = []
            for engine in engines:
                hosts.network.slow(*rates[links[0]])
                with _started(hosts, ENGINES[engine], batch_size) as workers:
                    facts = {"engine": engine} | json.loads(workers.lines()[0])
                    for link in links:
                        hosts.network.slow(*rates[link])
                        results.append({"link": link} | _measured(workers, facts, rounds))
    except NotAllowedError as error:
        raise DeviceError(
            f"--link {link}: this machine does not let us make two hosts with such a link between "
            f"them ({error}): run it as root, where ip and tc are installed; a delay needs netem, "
            "without which the rate alone may do."
        ) from error
    return sorted(results, key=lambda result: links.index(result["link"]))


def _rate(link: str) -> tuple[float, str]:
    """Returns bytes a second, and the delay."""
    rate, _, delay = link.partition(",")
    # As `tc` writes them, too.
    rate = rate.replace("gbit", "Gbit").replace("mbit", "Mbit")
    return sizes.bytes_per_second(rate), delay


def _measured(workers: _Workers, facts: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Measures over one link."""
    names = (answers.COMPUTE, answers.SEND, *ENGINES[facts["engine"]].ways)
    asked = {name: functools.partial(workers.slowest, name) for name in names}
    return judged(facts, take_turns(asked, rounds))


class _Workers:
    """Processes that each answer a line with a line, by rank."""

    def __init__(self, errors: IO[str]) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self._errors = errors

    def slowest(self, name: str) -> answers.Taken:
        """Has all measure, and returns what the slowest took."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
        return max(answers.Taken(*json.loads(line)) for line in self.lines())

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
def _started(hosts: Hosts, engine: Engine, batch_size: int) -> Iterator[_Workers]:
    """Starts a worker on each host, one after the other: rank 0 is there for the others to find."""
    places = ",".join(f"{a}:{5000 + i}" for i, a in enumerate(hosts.addresses.values()))
    command = [sys.executable, "-m", f"tfdist.bench.scaling.{engine.module}", engine.strategy]
    env = {"PYTHONPATH": ":".join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryFile("w+") as errors:
        workers = _Workers(errors)
        try:
            for rank, host in enumerate(hosts.addresses):
                pipes = {"stdin": subprocess.PIPE, "stderr": errors}
                own = [str(rank), places, str(batch_size)]
                process = hosts.start(host, [*command, *own], env, **pipes)
                workers.processes.append(process)
                workers.line(process)
            yield workers
        finally:
            hosts.end_all()
            for process in workers.processes:
                process.wait()
