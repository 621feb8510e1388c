"""`python -m benchmarks traffic`: the bytes that a host with several devices sends in a step.

Hosts are network namespaces of this machine. An all-reduce in a ring sends 2(N - 1)/N times the
gradients from each of N devices to the next one. If the devices of a host are neighbours in the
ring, only one of them sends to another host.
"""

from __future__ import annotations

import json as json_format
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from benchmarks.hosts import ENVIRON, Hosts, NotAllowedError, make_hosts
from tfdist.errors import DeviceError, LaunchError
from tfdist.tools.bench import harness

DESCRIPTION = "bytes that a host with several devices sends in a step (as root)"

_NOTE = (
    "sent: bytes that a host sends in a step, relative to those of the gradients. separate "
    "devices: what as many devices send in a ring over all of them, each on a host of its own."
)
_SECONDS = 240.0


class Setting(NamedTuple):
    """How the devices of a host are used.

    Attributes:
        strategy: The strategy.
        processes: Processes per host.
        devices: Devices of each process.
    """

    strategy: str
    processes: int
    devices: int


def settings(per_host: int) -> list[Setting]:
    """Returns what is measured.

    Args:
        per_host: Devices per host.
    """
    return [
        Setting("horovod", per_host, 1),
        Setting("multi_worker", per_host, 1),
        Setting("multi_worker", 1, per_host),
        Setting("sharded", 1, per_host),
    ]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--hosts", type=PositiveInt, default=2, metavar="N", help="hosts")
    parser.add_argument(
        "--per-host", type=PositiveInt, default=2, metavar="N", help="devices per host"
    )
    harness.add_arguments(parser, table=True)


def run(hosts: int, per_host: int, output: harness.Output, smoke: bool) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    Raises:
        DeviceError: No network namespaces can be created.
        LaunchError: A process failed.
    """
    measured = settings(per_host)[: 1 if smoke else None]
    try:
        with tempfile.TemporaryDirectory() as folder, make_hosts(Path(folder), hosts) as made:
            results = [measure(made, setting) for setting in measured]
    except NotAllowedError as error:
        raise DeviceError(
            f"this machine cannot create {hosts} hosts ({error}). Run as root, with ip installed."
        ) from error
    output.show(
        ("strategy", "processes per host", "devices per process", "sent", "separate devices"),
        [_cells(result) for result in results],
        f"{hosts} hosts with {per_host} devices each",
    )
    output.conclude(results, _NOTE)


def measure(hosts: Hosts, setting: Setting) -> dict[str, Any]:
    """Trains over the hosts, and returns what each of them sends in a step.

    Raises:
        LaunchError: A process failed.
    """
    places = ",".join(f"{host}:{setting.processes}" for host in hosts.addresses)
    with tempfile.TemporaryDirectory() as folder:
        worker = ["benchmarks.traffic_worker", setting.strategy, str(setting.devices), folder]
        train = ["--", sys.executable, "-m", *worker]
        launch = [sys.executable, "-m", "tfdist.launch", "--hosts", places]
        started = [
            hosts.start(host, [*launch, "--on", host, *train], ENVIRON) for host in hosts.addresses
        ]
        for process in started:
            printed, _ = process.communicate(timeout=_SECONDS)
            if process.returncode:
                raise LaunchError(f"{setting} failed: {printed[-2000:]}")
        # All processes of a host count the same link.
        answers = [json_format.loads(file.read_text()) for file in Path(folder).iterdir()]
    per_host = setting.processes * setting.devices
    num_devices = len(hosts.addresses) * per_host
    return {
        **setting._asdict(),
        "hosts": len(hosts.addresses),
        "sent": max(one["sent_bytes"] / one["gradient_bytes"] for one in answers),
        "separate_devices": per_host * 2 * (num_devices - 1) / num_devices,
    }


def _cells(result: dict[str, Any]) -> Sequence[str]:
    return [
        result["strategy"],
        str(result["processes"]),
        str(result["devices"]),
        f"{result['sent']:.2f}",
        f"{result['separate_devices']:.2f}",
    ]
