"""`python -m benchmarks remote_pipeline`: a pipeline over two hosts and a slow link.

Two hosts are network namespaces of this machine, joined by a link that `tc` slows down. Each runs a
device server with one stage, and the first one the training process too. Layers wait instead of
computing, so that the hosts may share cores.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from benchmarks.hosts import ENVIRON, Hosts, NotAllowedError, Workers, make_hosts
from tfdist.console import sizes
from tfdist.errors import DeviceError
from tfdist.tools.bench import harness
from tfdist.tools.plan.exchange import PAYLOAD

DESCRIPTION = "step time and bytes of a pipeline over two hosts and a slow link (as root)"

#: Rows of a batch, and layers of equal cost; there are two stages.
ROWS, LAYERS = 32, 2
_PORT = 2222
_NOTE = (
    "planned: from the waits of the layers and the time that activations and gradients take on the "
    "link, each overlapping with the other. bubble: the part of a step in which a stage does not "
    "compute. MB: sent from the first to the second host in a step, and back; planned: the "
    "activations, or their gradients."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--links", nargs="+", default=["1Gb", "200Mb"], metavar="RATE", help="links to measure"
    )
    parser.add_argument(
        "--micro-batches", nargs="+", type=PositiveInt, default=[2, 4, 8, 16], metavar="M",
        help="numbers of micro-batches, up to 32",
    )  # fmt: skip
    parser.add_argument(
        "--features", type=PositiveInt, default=16384, help="float32 activations of a row"
    )
    parser.add_argument(
        "--step-ms", type=PositiveInt, default=960, help="milliseconds of a step on one device"
    )
    harness.add_arguments(parser, steps=6, table=True)


def run(
    links: Sequence[str],
    micro_batches: Sequence[int],
    features: int,
    step_ms: int,
    steps: int,
    output: harness.Output,
    smoke: bool,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    Raises:
        DeviceError: No network namespaces can be created.
        ConfigurationError: A rate is malformed.
        LaunchError: A process failed.
    """
    if smoke:
        links, micro_batches, features, step_ms, steps = links[:1], [2], 64, 24, 3
    rates = {link: sizes.bytes_per_second(link) for link in links}
    try:
        with tempfile.TemporaryDirectory() as folder, make_hosts(Path(folder)) as hosts:
            results = _measure(hosts, rates, micro_batches, features, step_ms, steps)
    except NotAllowedError as error:
        raise DeviceError(
            f"this machine cannot create two hosts with a slow link ({error}). Run as root, with "
            "ip and tc installed."
        ) from error
    output.show(
        (
            "link", "micro-batches", "planned ms", "ms", "ratio", "planned bubble", "bubble",
            "planned MB", "MB to", "MB back",
        ),
        [_cells(result) for result in results],
        f"{step_ms} ms per step on one device, {ROWS} rows of {features} activations",
    )  # fmt: skip
    output.conclude(results, _NOTE)


def planned_seconds(num_micro_batches: int, forward: float, transfer: float) -> float:
    """Returns the seconds of a step of two stages in the order of GPipe.

    A backward turn takes twice as long as a forward turn. The link sends one tensor at a time.

    Args:
        num_micro_batches: Number of micro-batches.
        forward: Seconds of a stage's forward turn.
        transfer: Seconds in which the link sends the activations of a micro-batch.
    """
    first = link = second = 0.0
    for _ in range(num_micro_batches):
        first += forward
        link = max(link, first) + transfer
        second = max(second, link) + forward
    link = 0.0
    for _ in range(num_micro_batches):
        second += 2 * forward
        link = max(link, second) + transfer
        first = max(first, link) + 2 * forward
    return first


def _measure(
    hosts: Hosts,
    rates: dict[str, float],
    micro_batches: Sequence[int],
    features: int,
    step_ms: int,
    steps: int,
) -> list[dict[str, Any]]:
    results = []
    with _started(hosts, [str(features), str(step_ms), str(steps)]) as workers:
        for link, rate in rates.items():
            hosts.network.slow(rate)
            for number in micro_batches:
                sent = 4 * features * ROWS
                forward = step_ms / 1e3 / 3 / LAYERS / number
                planned = planned_seconds(number, forward, sent / number / (PAYLOAD * rate))
                results.append(
                    {
                        "link": link,
                        "micro_batches": number,
                        "planned_seconds": planned,
                        "computing_seconds": 3 * forward * number,
                        "planned_bytes": sent,
                    }
                    | workers.ask(str(number))[0]
                )
    return results


@contextlib.contextmanager
def _started(hosts: Hosts, arguments: Sequence[str]) -> Iterator[Workers]:
    """Starts a device server on each host and the training process on the first."""
    devices = ",".join(f"{address}:{_PORT}/CPU:0" for address in hosts.addresses.values())
    with hosts.workers() as workers:
        for host in hosts.addresses:
            server = [sys.executable, "-m", "tfdist.cluster.remote", str(_PORT)]
            hosts.start(host, server, ENVIRON, stdout=workers.errors)
        first = next(iter(hosts.addresses))
        workers.start(first, "benchmarks.remote_pipeline_worker", devices, *arguments)
        yield workers


def _cells(result: dict[str, Any]) -> list[str]:
    planned, found = result["planned_seconds"], result["seconds"]
    return [
        result["link"],
        str(result["micro_batches"]),
        f"{1e3 * planned:.0f}",
        f"{1e3 * found:.0f}",
        f"{planned / found:.2f}",
        f"{1 - result['computing_seconds'] / planned:.0%}",
        f"{1 - result['computing_seconds'] / found:.0%}",
        f"{result['planned_bytes'] / 1e6:.2f}",
        f"{result['tx_bytes'] / 1e6:.2f}",
        f"{result['rx_bytes'] / 1e6:.2f}",
    ]
