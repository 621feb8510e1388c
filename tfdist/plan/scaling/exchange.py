"""How long gradients take to cross, by strategy: the alpha-beta model. Imports no TensorFlow.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations
in MPICH" (latency and bytes a link); Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce
Algorithms for Clusters of Workstations" (the ring); Li et al. 2014, "Scaling Distributed Machine
Learning with the Parameter Server" (servers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: The part of an Ethernet link's rate that is left for what TCP carries: of 1538 bytes that a frame
#: takes with its gap, 1448, where frames are not larger than usual.
PAYLOAD = 1448 / 1538


class Link(NamedTuple):
    """A link in one direction; both may be used at once.

    Attributes:
        rate: Bytes a second, of what is carried.
        latency: Seconds until the first of them is there.
    """

    rate: float
    latency: float

    def seconds(self, num_bytes: float, num_messages: int) -> float:
        """Returns how long messages take one behind the other."""
        return num_bytes / self.rate + num_messages * self.latency


class Wires(NamedTuple):
    """What joins the workers.

    Attributes:
        outer: Between hosts.
        inner: Between the devices of a host.
        per_host: Devices of a host; 1: all are joined by the outer link.
        num_servers: Parameter servers, each on a link of its own.
    """

    outer: Link
    inner: Link
    per_host: int = 1
    num_servers: int = 1


def ring(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Ring all-reduce: 2(n-1) messages of the n-th part each, over the slowest link."""
    n = num_workers
    link = wires.inner if n <= wires.per_host else wires.outer
    return link.seconds(2 * (n - 1) / n * num_bytes, 2 * (n - 1))


def parameter_server(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Every worker fetches the weights and sends gradients; the servers' links are shared."""
    a_link = max(1.0, num_workers / wires.num_servers) * num_bytes
    return 2 * wires.outer.seconds(a_link, 1)


def hierarchical(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Sums within each host, a ring of one device of each, and copies within each host."""
    inside = min(num_workers, wires.per_host)
    hosts = -(-num_workers // inside)
    within = 2 * wires.inner.seconds((inside - 1) * num_bytes, 1) if inside > 1 else 0.0
    return within + (ring(num_bytes, hosts, wires._replace(per_host=1)) if hosts > 1 else 0.0)


def sharded(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Sums scattered and weights joined, each half of a ring (Rajbhandari et al. 2020, 7.2)."""
    return ring(num_bytes, num_workers, wires)


def sharded_optimizer(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Sums that all have whole, by a ring, and weights joined by half of one more."""
    return 1.5 * ring(num_bytes, num_workers, wires)


def sharded_parameters(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Weights joined twice, and sums scattered, each half of a ring."""
    return 1.5 * ring(num_bytes, num_workers, wires)


def central_storage(num_bytes: float, num_workers: int, wires: Wires) -> float | None:
    """All gradients to one device of the host, and the weights from there; None: several hosts."""
    if num_workers > wires.per_host:
        return None
    return 2 * wires.inner.seconds(num_workers * num_bytes, 1)


#: By name: takes bytes of a gradient, workers and wires; returns seconds, None where there is none.
EXCHANGES: dict[str, Callable[[float, int, Wires], float | None]] = {
    "parameter_server": parameter_server,
    "ring": ring,
    "hierarchical": hierarchical,
    "central_storage": central_storage,
    "sharded": sharded,
    "sharded_optimizer": sharded_optimizer,
    "sharded_parameters": sharded_parameters,
}
#: Those that send float32, whatever gradients are computed in.
_AS_THEY_ARE = ("sharded", "sharded_optimizer", "sharded_parameters")


class Step(NamedTuple):
    """A step of several workers.

    Attributes:
        seconds: It takes.
        efficiency: The part of them that one worker alone would take.
        exchange: Seconds in which gradients cross, also those hidden behind the backward pass.
    """

    seconds: float
    efficiency: float
    exchange: float


class Profile(NamedTuple):
    """What a worker does in a step, measured or given.

    Attributes:
        seconds: Computing its share.
        gradient_bytes: Of all trainable weights.
        exchange_seconds: That an exchange takes beside what its links do, however small.
        exchange_rate: Bytes a second that the software moves where no link limits it; 0: no limit.
    """

    seconds: float
    gradient_bytes: float
    exchange_seconds: float = 0.0
    exchange_rate: float = 0.0


#: The part of a step's computation that is the backward pass: twice the forward pass's work.
_BACKWARD = 2 / 3


def step(
    strategy: str,
    profile: Profile,
    num_workers: int,
    wires: Wires,
    overlap: float = 0.0,
    compression: float = 1.0,
) -> Step | None:
    """Returns the step of so many workers, each with a share of the same size; None: there is none.

    Args:
        strategy: One of `EXCHANGES`.
        profile: Of one worker.
        num_workers: From 1 on.
        wires: That join them.
        overlap: The part of the backward pass behind which an exchange hides; 0: it comes after it.
        compression: By which gradients are smaller on their way; not of what is sharded.
    """
    if num_workers == 1:
        return Step(profile.seconds, 1.0, 0.0)
    if profile.exchange_rate:  # what a link carries at most, the software has to move too
        outer, inner = (
            link._replace(rate=min(link.rate, profile.exchange_rate))
            for link in (wires.outer, wires.inner)
        )
        wires = wires._replace(outer=outer, inner=inner)
    sent = profile.gradient_bytes / (1.0 if strategy in _AS_THEY_ARE else compression)
    crossing = EXCHANGES[strategy](sent, num_workers, wires)
    if crossing is None:
        return None
    exchange = crossing + profile.exchange_seconds
    seconds = profile.seconds + max(0.0, exchange - overlap * _BACKWARD * profile.seconds)
    return Step(seconds, profile.seconds / seconds, exchange)
