"""The network of `hosts`: a namespace each, and wires to a switch, which is a namespace too."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping

#: The namespace of the switch, beside those of the hosts.
_SWITCH = "switch"
#: Of a wire with a rate: the seconds whose bytes may pass at once after a pause, the fewest such
#: bytes, and how long the rest may wait. A kernel that is busy looks again some milliseconds late,
#: and what could have passed by then is lost; it hands over up to 64 kB at a time.
_BURST_SECONDS, _LEAST_BURST, _LONGEST_WAIT = 4e-3, 1 << 16, "200ms"


class NotAllowedError(Exception):
    """This machine does not let us make hosts; says why."""


class HostNetwork:
    """Namespaces and their wires.

    Attributes:
        prefix: Of the namespaces' names.
        addresses: The address of each host, by its name.
    """

    def __init__(self, prefix: str, addresses: Mapping[str, str]) -> None:
        self.prefix, self.addresses = prefix, addresses

    def build(self) -> None:
        """Makes the namespaces and the wires.

        Raises:
            NotAllowedError: This user, or this machine, may not.
        """
        for name in (_SWITCH, *self.addresses):
            self._ip("netns", "add", f"{self.prefix}-{name}")
        switch = ("-n", f"{self.prefix}-{_SWITCH}")
        self._ip(*switch, "link", "add", "ports", "type", "bridge")
        self._ip(*switch, "link", "set", "ports", "up")
        for host, address in self.addresses.items():
            inside = f"{self.prefix}-{host}"
            far_end = ("type", "veth", "peer", "name", "wire", "netns", inside)
            self._ip(*switch, "link", "add", f"to-{host}", *far_end)
            self._ip(*switch, "link", "set", f"to-{host}", "master", "ports", "up")
            self._ip("-n", inside, "address", "add", f"{address}/24", "dev", "wire")
            self._ip("-n", inside, "link", "set", "lo", "up")
        self.set_wires("up")

    def remove(self) -> None:
        """Takes the namespaces away, and the wires with them; also those of a half made network."""
        for name in (*self.addresses, _SWITCH):
            with contextlib.suppress(NotAllowedError):
                self._ip("netns", "delete", f"{self.prefix}-{name}")

    def set_wires(self, state: str) -> None:
        """Has all wires carry, `"up"`, or not, `"down"`."""
        for host in self.addresses:
            self._ip("-n", f"{self.prefix}-{host}", "link", "set", "wire", state)

    def slow(self, bytes_per_second: float, delay: str = "") -> None:
        """Gives what each host sends a rate, and a delay.

        Args:
            bytes_per_second: The rate.
            delay: As `tc` takes it: `0.1ms`; empty: none.

        Raises:
            NotAllowedError: There is no `tc`, or the kernel has no token bucket, or no delay.
        """
        rate = ["rate", str(round(8 * bytes_per_second))]
        burst = str(max(_LEAST_BURST, round(_BURST_SECONDS * bytes_per_second)))
        # A queue that waits, or one that delays, and has a rate by itself.
        kind = (
            ["netem", "delay", delay, *rate]
            if delay
            else ["tbf", *rate, "burst", burst, "latency", _LONGEST_WAIT]
        )
        for host in self.addresses:
            inside = ("-n", f"{self.prefix}-{host}")
            self._say("tc", *inside, "qdisc", "replace", "dev", "wire", "root", *kind)

    def running(self, host: str) -> list[int]:
        """Returns the processes that run on a host."""
        return [int(pid) for pid in self._ip("netns", "pids", f"{self.prefix}-{host}").split()]

    def _ip(self, *arguments: str) -> str:
        return self._say("ip", *arguments)

    def _say(self, *command: str) -> str:
        """Runs a command and returns what it says."""
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotAllowedError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout
