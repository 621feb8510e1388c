"""The connection of this process to device servers, and the names of their devices.

TensorFlow connects a process to a set of servers once. Its own devices keep their names, so that
variables and data sets that exist already stay valid.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.cluster import networks
from tfdist.cluster.deadline import counted, exit_now
from tfdist.cluster.record import joined, split
from tfdist.cluster.remote import FULL, JOB, REMOTE
from tfdist.cluster.remote import is_remote as is_remote
from tfdist.cluster.remote import names_remote as names_remote
from tfdist.cluster.remote import servers_of as servers_of
from tfdist.cluster.remote.heartbeat import Heartbeat, Lost, first_lost, wait_for
from tfdist.errors import PEER_LOST, ClusterError, DeviceError, first_line

#: With eager operations streamed to servers, a function could read a variable before an earlier
#: assignment arrives there.
_STREAMING = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"
#: Time for TensorFlow's own error to arrive, which ends a call in an orderly way.
_ERROR_SECONDS = 2.0
_TASK = re.compile(r"/job:device_server/replica:0/task:(\d+)")

#: Number of calls in progress that need the servers.
_calls = 0

_servers: list[str] = []
_heartbeat: Heartbeat | None = None


def resolve(names: Sequence[str]) -> list[str]:
    """Connects this process to the servers that are named, and returns full names of devices.

    Args:
        names: Such as `"host-b:2222/GPU:0"`, or `"CPU:0"` for a device of this process. Full names
            are returned unchanged.

    Raises:
        ClusterError: A server does not answer.
        DeviceError: This process is connected to other servers, or a server has no such device.
    """
    matches = [REMOTE.fullmatch(name) for name in names]
    servers = servers_of(names)
    if not _servers:
        _connect(servers)
    if unknown := [server for server in servers if server not in _servers]:
        raise DeviceError(
            f"This process is connected to {', '.join(_servers)}, and TensorFlow connects one once:"
            f" name all servers the first time, or use a new process for {', '.join(unknown)}."
        )
    full = [
        f"/job:{JOB}/replica:0/task:{_servers.index(match['server'])}"
        f"/device:{match['kind'].upper()}:{match['number']}"
        if match
        else on_this_host(name)
        for match, name in zip(matches, names, strict=True)
    ]
    local_names = {device.name for device in tf.config.list_logical_devices()}
    for name, device in zip(names, full, strict=True):
        if is_remote(device) and device not in local_names:
            there = [short(one) for one in sorted(local_names) if is_remote(one)]
            raise DeviceError(f"No device {name}: the servers have {', '.join(there)}.")
    return full


def _connect(servers: Sequence[str]) -> None:
    global _heartbeat
    with counted():
        wait_for(servers)
    # TensorFlow waits for a server that is lost from now on, and blocks Python meanwhile.
    _heartbeat = Heartbeat(servers, PEER_LOST)
    os.environ[_STREAMING] = "0"
    own_address = joined(networks.address_towards(split(servers[0])[0]), networks.free_ports(1)[0])
    networks.bypass_proxy([own_address, *servers])
    jobs = {"localhost": [own_address], JOB: list(servers)}
    try:
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(jobs), job_name="localhost", protocol="grpc"
        )
        tf.config.list_logical_devices()  # connects, which may wait for ever
    except tf.errors.OpError as error:
        if lost := first_lost(servers):
            raise error_of(lost) from error
        raise
    finally:
        _heartbeat.listen()
    _servers.extend(servers)


def error_of(lost: Lost) -> ClusterError:
    """Returns the error for a lost server."""
    error = ClusterError(str(lost))
    error.exit_code = PEER_LOST
    # At the end of the process, the collection of TensorFlow's and Keras's objects takes more than
    # a second of CPU time: the launcher waits for the process, to start it again.
    atexit.register(gc.freeze)
    return error


def heartbeat() -> Heartbeat | None:
    """Returns what watches the servers, if this process is connected to some."""
    return _heartbeat if _servers else None


def connected() -> list[str]:
    """Returns the servers that this process is connected to, by the number of TensorFlow's task."""
    return list(_servers)


def on_this_host(device: str) -> str:
    """Returns a device of this process by the name that it has within any device scope.

    `tf.device("CPU:0")` within the scope of a remote device is the processor of the other host.

    Args:
        device: Such as `"CPU:0"`. It is returned unchanged in a process without device servers,
            whose own job TF_CONFIG may name, and so is a full name.
    """
    if not _servers or device.startswith("/job:"):
        return device
    return f"/job:localhost/replica:0/task:0/device:{device}"


def of_this_process(device: str) -> str:
    """Returns a device, or this process's host for one that is remote.

    Python functions and Horovod's operations do not run on device servers.
    """
    return on_this_host("CPU:0") if is_remote(device) else device


def path(device: str) -> str:
    """Returns a device in the form that TensorFlow's strategies require."""
    return device if device.startswith("/") else f"/device:{device}"


def short(device: str) -> str:
    """Returns the name of a device as a user writes it."""
    if match := FULL.fullmatch(device):
        return f"{_servers[int(match[1])]}/{match[2]}"
    return device.rpartition("device:")[2]


@contextmanager
def spread(devices: Sequence[str], otherwise: str) -> Iterator[None]:
    """Creates variables on the devices in turn, so that no host has to hold all of them.

    Each is created on the device with the fewest bytes so far; strategies move it later, directly
    between the servers.

    Args:
        devices: Full names.
        otherwise: The device of everything else, and of all variables if no device is remote.
    """
    held = dict.fromkeys(devices, 0)

    def create(next_creator: Any, **options: Any) -> tf.Variable:
        if options.get("dtype") is None or not tf.as_dtype(options["dtype"]).is_floating:
            return next_creator(**options)
        device = min(held, key=lambda name: held[name])
        with tf.device(device):
            variable = next_creator(**options)
        if variable.shape.rank == 0:  # a metric or a learning rate, which the host reads
            return next_creator(**options | {"initial_value": variable.read_value()})
        held[device] += variable.shape.num_elements() * variable.dtype.size
        return variable

    with tf.device(otherwise):
        if not any(map(is_remote, devices)):
            yield
            return
        with tf.variable_creator_scope(create):
            yield


@contextmanager
def watched() -> Iterator[None]:
    """A context for calls that need the device servers, if this process is connected to some.

    Raises:
        ClusterError: A server is lost, and TensorFlow noticed. If it waits for the server instead,
            this process ends with the exit code of the watchdog.
    """
    global _calls
    if (asking := heartbeat()) is None:
        yield
        return
    asking.on_loss = _end_calls
    if asking.lost:
        raise error_of(asking.lost)
    _calls += 1
    try:
        yield
    except ClusterError:
        raise
    except Exception as error:
        errors = _errors_of_tensorflow(error)
        if errors and (lost := asking.lost or _explanation(errors)):
            raise error_of(lost) from error
        raise
    finally:
        _calls -= 1


def _end_calls(lost: Lost) -> None:
    """Ends this process if a call still waits for a lost server."""
    time.sleep(_ERROR_SECONDS)
    if _calls:
        exit_now(str(lost))


def _errors_of_tensorflow(error: BaseException | None) -> list[tf.errors.OpError]:
    """Returns those among an error and its causes."""
    errors = []
    while error is not None:
        errors += [error] if isinstance(error, tf.errors.OpError) else []
        error = error.__cause__ or error.__context__
    return errors


def _explanation(errors: Sequence[tf.errors.OpError]) -> Lost | None:
    """Returns the server whose loss explains errors, if it does."""
    servers = connected()
    if lost := first_lost(servers):
        return lost
    for one in errors:  # of a server that was started again
        named = _TASK.search(str(one))
        if isinstance(one, (tf.errors.UnavailableError, tf.errors.AbortedError)):
            server = servers[int(named[1])] if named else ", ".join(servers)
            return Lost(server, f"was lost ({first_line(one)})")
    return None
