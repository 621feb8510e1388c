"""Hosts on one machine: network namespaces of their own, each with a virtual wire to a switch.

Each has its name, its address, its loopback and its shared memory. They share files, as hosts with
a network file system do, and nothing else: what one tells another crosses their wires, and these
can be cut. `ssh` leads from one to another, so that mpirun and horovodrun start ranks there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import string
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.bench.host_network import HostNetwork, NotAllowedError
from tfdist.launcher.signals import signals_raise

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


class Hosts:
    """Hosts `"a"`, `"b"` and so on.

    Attributes:
        addresses: The address of each, by name.
        network: That joins them.
    """

    def __init__(self, folder: Path, num_hosts: int) -> None:
        names = string.ascii_lowercase[:num_hosts]
        self.addresses = {host: f"10.213.0.{i}" for i, host in enumerate(names, start=1)}
        self._folder = folder
        self.network = HostNetwork(f"tfdist-{os.getpid()}-{next(_numbers)}", self.addresses)
        lines = [f"{address} {host}" for host, address in self.addresses.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for name, text in {"enter": _ENTER, "ssh": _SSH}.items():
            script = folder / name
            script.write_text(text.format(folder=folder, prefix=self.network.prefix))
            script.chmod(0o755)

    def start(
        self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[str]:
        """Starts a command on a host and returns its process, whose output can be read.

        Args:
            host: Its name.
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
                self.end_all()  # what it started on any host holds its output open
                raise
        return subprocess.CompletedProcess(command, process.returncode, out)

    def cut(self) -> None:
        """Cuts all wires."""
        self.network.set_wires("down")

    def mend(self) -> None:
        """Puts them together again."""
        self.network.set_wires("up")

    def build(self) -> None:
        """Makes the network.

        Raises:
            NotAllowedError: This user, or this machine, may not.
        """
        self.network.build()
        if done := self.run(next(iter(self.addresses)), ["true"]).stdout:
            raise NotAllowedError(done.strip())

    def remove(self) -> None:
        """Ends what runs there and takes the network away."""
        with contextlib.suppress(NotAllowedError):  # half made
            self.end_all()
        self.network.remove()

    def end_all(self) -> None:
        """Kills whatever still runs on any host."""
        for pid in itertools.chain(*map(self.network.running, self.addresses)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def make_hosts(folder: Path, num_hosts: int = 2) -> Iterator[Hosts]:
    """Makes hosts and removes them, with all that runs there, also where a signal ends this.

    Args:
        folder: For the scripts that lead there.
        num_hosts: At most 26.

    Raises:
        NotAllowedError: This user, or this machine, may not.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise NotAllowedError("there is no program `ip` or `tc`: apt-get install iproute2")
    hosts = Hosts(folder, num_hosts)
    with signals_raise():
        try:
            hosts.build()
            yield hosts
        finally:
            hosts.remove()
