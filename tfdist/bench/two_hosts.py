"""Two hosts on one machine: network namespaces of their own, joined by a virtual wire.

Each has its name, its address, its loopback and its shared memory. They share files, as hosts with
a network file system do, and nothing else: what one tells the other crosses the wire, and the wire
can be cut. `ssh` leads from one to the other, so that mpirun and horovodrun start ranks there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.launcher.signals import signals_raise

HOSTS = ("a", "b")
#: Of a wire with a rate: what may pass at once, and how long the rest may wait.
_BUCKET = ("burst", "128kb", "latency", "200ms")

_numbers = itertools.count()

#: Enters a host. Its own shared memory and names of hosts come in a mount namespace.
_ENTER = """#!/bin/sh
host=$1
shift
exec ip netns exec "{prefix}-$host" unshare --uts --ipc --mount sh -c '
    hostname "$1" && mount --bind "{folder}/hosts" /etc/hosts &&
    mount -t tmpfs none /dev/shm || exit
    shift
    exec "$@"
' sh "$host" "$@"
"""

#: What mpirun and horovodrun call with options, before or behind the host, and words for the shell
#: of that host. As there, the variables of the caller stay behind.
_SSH = """#!/bin/sh
host=
while :; do
    case "$1" in
        -o|-p|-l|-i) shift 2 ;;
        -*) shift ;;
        *)
            [ -n "$host" ] && break
            host=$1
            shift ;;
    esac
done
exec "{folder}/enter" "$host" env -i HOME="$HOME" PATH="$PATH" sh -c "$*"
"""


class NotAllowedError(Exception):
    """This machine does not let us make hosts; says why."""


class TwoHosts:
    """Hosts `"a"` and `"b"`.

    Attributes:
        addresses: The address of each, by name.
    """

    def __init__(self, folder: Path) -> None:
        self.addresses = {host: f"10.213.0.{i}" for i, host in enumerate(HOSTS, start=1)}
        self._folder = folder
        self._prefix = f"tfdist-{os.getpid()}-{next(_numbers)}"
        lines = [f"{address} {host}" for host, address in self.addresses.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for name, text in {"enter": _ENTER, "ssh": _SSH}.items():
            script = folder / name
            script.write_text(text.format(folder=folder, prefix=self._prefix))
            script.chmod(0o755)

    def start(
        self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[str]:
        """Starts a command on a host and returns its process, whose output can be read.

        Args:
            host: `"a"` or `"b"`.
            command: The program and its arguments.
            env: Variables over those of this process.
            **how: What `subprocess.Popen` takes else.
        """
        path = f"{self._folder}{os.pathsep}{os.environ['PATH']}"
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | how
        return subprocess.Popen(
            [str(self._folder / "enter"), host, *command],
            env=os.environ | {"PATH": path} | dict(env or {}),
            **how,
        )

    def run(
        self,
        host: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        seconds: float = 240.0,
        **how: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host to its end, as `start` takes it; stdout holds stderr too.

        Raises:
            subprocess.TimeoutExpired: It took longer than the seconds given.
        """
        with self.start(host, command, env, **how) as process:
            try:
                out, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                self.end_all()  # what it started on either host holds its output open
                raise
        return subprocess.CompletedProcess(command, process.returncode, out)

    def cut(self) -> None:
        """Cuts the wire."""
        self._set_wire("down")

    def mend(self) -> None:
        """Puts the wire together again."""
        self._set_wire("up")

    def slow(self, bytes_per_second: float, delay: str = "") -> None:
        """Gives the wire a rate in both directions, and a delay.

        Args:
            bytes_per_second: The rate.
            delay: In each direction, as `tc` takes it: `0.1ms`; empty: none.

        Raises:
            NotAllowedError: There is no `tc`, or the kernel has no token bucket, or no delay.
        """
        rate = ["rate", str(round(8 * bytes_per_second))]
        # A queue that waits, or one that delays, and has a rate by itself.
        kind = ["netem", "delay", delay, *rate] if delay else ["tbf", *rate, *_BUCKET]
        for host in HOSTS:
            done = self.run(host, ["tc", "qdisc", "replace", "dev", "wire", "root", *kind])
            if done.returncode:
                raise NotAllowedError(f"tc {' '.join(kind)}: {done.stdout.strip()}")

    def running(self, host: str) -> list[int]:
        """Returns the processes that run on a host."""
        return [int(pid) for pid in self._ip("netns", "pids", f"{self._prefix}-{host}").split()]

    def end_all(self) -> None:
        """Kills whatever still runs on either host."""
        for pid in itertools.chain(*map(self.running, HOSTS)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def build(self) -> None:
        """Makes the namespaces and the wire.

        Raises:
            NotAllowedError: This user, or this machine, may not.
        """
        for host in HOSTS:
            self._ip("netns", "add", f"{self._prefix}-{host}")
        one, other = (f"{self._prefix}-{host}" for host in HOSTS)
        wire = ("link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", other)
        self._ip("-n", one, *wire)
        for host, address in self.addresses.items():
            inside = ("-n", f"{self._prefix}-{host}")
            self._ip(*inside, "address", "add", f"{address}/24", "dev", "wire")
            self._ip(*inside, "link", "set", "lo", "up")
        self.mend()
        if done := self.run(HOSTS[0], ["true"]).stdout:
            raise NotAllowedError(done.strip())

    def remove(self) -> None:
        """Ends what runs there and takes the namespaces away, and the wire with them."""
        with contextlib.suppress(NotAllowedError):  # half made
            self.end_all()
        for host in HOSTS:
            with contextlib.suppress(NotAllowedError):
                self._ip("netns", "delete", f"{self._prefix}-{host}")

    def _set_wire(self, state: str) -> None:
        for host in HOSTS:
            self._ip("-n", f"{self._prefix}-{host}", "link", "set", "wire", state)

    def _ip(self, *arguments: str) -> str:
        """Runs `ip` and returns what it says."""
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotAllowedError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Makes two hosts and removes them, with all that runs there, also where a signal ends this.

    Args:
        folder: For the scripts that lead there.

    Raises:
        NotAllowedError: This user, or this machine, may not.
    """
    if shutil.which("ip") is None:
        raise NotAllowedError("there is no program `ip`: apt-get install iproute2")
    hosts = TwoHosts(folder)
    with signals_raise():
        try:
            hosts.build()
            yield hosts
        finally:
            hosts.remove()
