"""Devices of other hosts, which TensorFlow's own runtime computes on: `HOST:PORT/GPU:0`.

`tfdist remote PORT` serves the devices of a host. `connection` connects a training
process to such servers, and `heartbeat` starts a process that runs
`probe`, which finds servers that no longer answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: `HOST:PORT/GPU:0`.
REMOTE = re.compile(r"(?P<server>[^/\s]+:\d+)/(?:device:)?(?P<kind>CPU|GPU):(?P<number>\d+)", re.I)
#: TensorFlow's job of the device servers, and its full name of one of their devices.
JOB = "device_server"
FULL = re.compile(rf"/job:{JOB}/replica:0/task:(\d+)/device:(.*)")


def names_remote(devices: object) -> bool:
    """Tells whether devices, as for `tfdist.devices.resolve`, name one of another host."""
    names = [devices] if isinstance(devices, str) else devices
    return isinstance(names, Sequence) and any(
        REMOTE.fullmatch(str(name)) or is_remote(str(name)) for name in names
    )


def is_remote(device: str) -> bool:
    """Tells whether TensorFlow's full name of a device is that of a device server."""
    return FULL.fullmatch(device) is not None


def servers_of(devices: Sequence[str]) -> list[str]:
    """Returns the different servers that devices are on, in order."""
    matches = map(REMOTE.fullmatch, devices)
    return list(dict.fromkeys(match["server"] for match in matches if match))
