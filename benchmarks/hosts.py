"""Several hosts on one machine: network namespaces, each joined to a switch by a virtual link.

Each host has its own name, address, loopback and shared memory. They share files, as hosts with a
network file system do; everything else passes through their links, which can be slowed down and
disconnected. An `ssh` leads from one host to another, for mpirun and horovodrun.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tfdist.cluster.launcher.processes import signals_raise
from tfdist.errors import LaunchError

_numbers = itertools.count()

#: Variables of Python programs on the hosts, which use the packages of this process.
ENVIRON = {"PYTHONPATH": ":".join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}

#: Runs a command on a host. Shared memory and host names are in a mount namespace of its own.
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

#: What mpirun and horovodrun call with options before or after the host, and words for the shell
#: there. As with the real ssh, the variables of the caller are not passed on.
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

#: The namespace of the switch.
_SWITCH = "switch"
#: The token bucket of a slow link: the seconds of traffic that may pass at once after a pause, the
#: least such bytes, and the longest wait in the queue. A busy kernel refills the bucket some
#: milliseconds late, which would lose bandwidth, and sends up to 64 kB at a time.
_BURST_SECONDS, _LEAST_BURST, _LONGEST_WAIT = 4e-3, 1 << 16, "200ms"


class NotAllowedError(Exception):
    """This user or machine cannot create network namespaces; the message says why."""


class Hosts:
    """Hosts `"a"`, `"b"` and so on.

    Attributes:
        addresses: Addresses by host.
        network: The network between them.
    """

    def __init__(self, folder: Path, num_hosts: int) -> None:
        names = string.ascii_lowercase[:num_hosts]
        self.addresses = {host: f"10.213.0.{i}" for i, host in enumerate(names, start=1)}
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
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
        """Starts a command on a host and returns its process.

        Args:
            host: Name of the host.
            command: Program and arguments.
            env: Variables in addition to those of this process.
            **how: Further arguments of `subprocess.Popen`; by default output goes to a pipe.
        """
        path = f"{self._folder}{os.pathsep}{os.environ['PATH']}"
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | how
        process = subprocess.Popen(
            [str(self._folder / "enter"), host, *command],
            env=os.environ | {"PATH": path} | dict(env or {}),
            **how,
        )
        self._started.append(process)
        return process

    def run(
        self,
        host: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        seconds: float = 240.0,
        **how: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host to its end; `stdout` contains standard error too.

        Raises:
            subprocess.TimeoutExpired: It took longer than `seconds`.
        """
        with self.start(host, command, env, **how) as process:
            try:
                out, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                self.end_all()  # processes that it started keep its output open
                raise
        return subprocess.CompletedProcess(command, process.returncode, out)

    @contextlib.contextmanager
    def workers(self) -> Iterator[Workers]:
        """Returns programs to start, which are killed at the end of the block, as all others."""
        with tempfile.TemporaryFile("w+") as errors:
            try:
                yield Workers(self, errors)
            finally:
                self.end_all()
                for process in self._started:
                    process.wait()

    def cut(self) -> None:
        """Disconnects all links."""
        self.network.set_wires("down")

    def mend(self) -> None:
        """Reconnects all links."""
        self.network.set_wires("up")

    def build(self) -> None:
        """Creates the network.

        Raises:
            NotAllowedError: This user or machine cannot.
        """
        self.network.build()
        if done := self.run(next(iter(self.addresses)), ["true"]).stdout:
            raise NotAllowedError(done.strip())

    def remove(self) -> None:
        """Ends all processes on the hosts and removes the network."""
        with contextlib.suppress(NotAllowedError):  # partly created
            self.end_all()
        self.network.remove()

    def end_all(self) -> None:
        """Kills all processes on all hosts."""
        for process in self._started:  # also those that have not entered their host yet
            process.kill()
        for pid in itertools.chain(*map(self.network.running, self.addresses)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Workers:
    """Programs on hosts that answer each line of their input with a line of JSON."""

    def __init__(self, hosts: Hosts, errors: IO[str]) -> None:
        self.errors, self._hosts = errors, hosts
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, host: str, module: str, *arguments: str) -> None:
        """Starts a Python module on a host."""
        command = [sys.executable, "-m", module, *arguments]
        pipes = {"stdin": subprocess.PIPE, "stderr": self.errors}
        self._processes.append(self._hosts.start(host, command, ENVIRON, **pipes))

    def ask(self, question: str) -> list[Any]:
        """Returns the answers of all programs to a line, in the order in which they started."""
        for process in self._processes:
            with contextlib.suppress(OSError):  # it has ended
                print(question, file=process.stdin, flush=True)
        return self.answers()

    def answers(self) -> list[Any]:
        """Returns the next answer of each program."""
        return [json.loads(self.read(number)) for number in range(len(self._processes))]

    def read(self, number: int = -1) -> str:
        """Returns the next line of a program, by default of the one that started last.

        Raises:
            LaunchError: The program ended.
        """
        output = self._processes[number].stdout
        if output is not None and (line := output.readline()):
            return line
        self.errors.seek(0)
        raise LaunchError(f"a worker ended: {self.errors.read()[-2000:]}")


class HostNetwork:
    """Network namespaces and the links between them; the switch is a namespace too."""

    def __init__(self, prefix: str, addresses: Mapping[str, str]) -> None:
        self.prefix, self.addresses = prefix, addresses

    def build(self) -> None:
        """Creates namespaces and links.

        Raises:
            NotAllowedError: This user or machine cannot.
        """
        for name in (_SWITCH, *self.addresses):
            _output("ip", "netns", "add", f"{self.prefix}-{name}")
        switch = ("-n", f"{self.prefix}-{_SWITCH}")
        _output("ip", *switch, "link", "add", "ports", "type", "bridge")
        _output("ip", *switch, "link", "set", "ports", "up")
        for host, address in self.addresses.items():
            inside = f"{self.prefix}-{host}"
            far_end = ("type", "veth", "peer", "name", "wire", "netns", inside)
            _output("ip", *switch, "link", "add", f"to-{host}", *far_end)
            _output("ip", *switch, "link", "set", f"to-{host}", "master", "ports", "up")
            _output("ip", "-n", inside, "address", "add", f"{address}/24", "dev", "wire")
            _output("ip", "-n", inside, "link", "set", "lo", "up")
        self.set_wires("up")

    def remove(self) -> None:
        """Removes the namespaces and links, also those of a partly created network."""
        for name in (*self.addresses, _SWITCH):
            with contextlib.suppress(NotAllowedError):
                _output("ip", "netns", "delete", f"{self.prefix}-{name}")

    def set_wires(self, state: str) -> None:
        """Connects (`"up"`) or disconnects (`"down"`) all links."""
        for host in self.addresses:
            _output("ip", "-n", f"{self.prefix}-{host}", "link", "set", "wire", state)

    def slow(self, bytes_per_second: float, delay: str = "") -> None:
        """Limits what each host sends.

        Args:
            bytes_per_second: The rate.
            delay: A delay such as `0.1ms`, or an empty string.

        Raises:
            NotAllowedError: `tc` is missing, or the kernel has no token bucket or no netem.
        """
        rate = ["rate", str(round(8 * bytes_per_second))]
        burst = str(max(_LEAST_BURST, round(_BURST_SECONDS * bytes_per_second)))
        kind = (
            ["netem", "delay", delay, *rate]
            if delay
            else ["tbf", *rate, "burst", burst, "latency", _LONGEST_WAIT]
        )
        for host in self.addresses:
            inside = ("-n", f"{self.prefix}-{host}")
            _output("tc", *inside, "qdisc", "replace", "dev", "wire", "root", *kind)

    def running(self, host: str) -> list[int]:
        """Returns the process ids on a host."""
        return list(map(int, _output("ip", "netns", "pids", f"{self.prefix}-{host}").split()))


@contextlib.contextmanager
def make_hosts(folder: Path, num_hosts: int = 2) -> Iterator[Hosts]:
    """Creates hosts, and removes them with all their processes, also after a signal.

    Args:
        folder: Folder for scripts.
        num_hosts: Number of hosts, at most 26.

    Raises:
        NotAllowedError: This user or machine cannot.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise NotAllowedError("the programs `ip` and `tc` are missing: apt-get install iproute2")
    hosts = Hosts(folder, num_hosts)
    with signals_raise():
        try:
            hosts.build()
            yield hosts
        finally:
            hosts.remove()


def _output(*command: str) -> str:
    """Runs a command and returns its output.

    Raises:
        NotAllowedError: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAllowedError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
