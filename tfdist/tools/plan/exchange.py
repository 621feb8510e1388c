"""Predicts the time to reduce gradients, with the alpha-beta model. Imports no TensorFlow.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations
in MPICH" (latency and bandwidth); Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce
Algorithms for Clusters of Workstations" (the ring); Li et al. 2014, "Scaling Distributed Machine
Learning with the Parameter Server" (servers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Fraction of an Ethernet link's bandwidth that is available for TCP payload: 1448 of the 1538
#: bytes of a frame with the default MTU, including the gap between frames.
PAYLOAD = 1448 / 1538


class Link(NamedTuple):
    """A full-duplex network link.

    Attributes:
        rate: Bytes of payload per second, in each direction.
        latency: Seconds until the first byte arrives.
    """

    rate: float
    latency: float

    def seconds(self, num_bytes: float, num_messages: int) -> float:
        """Returns the time of `num_messages` consecutive messages with `num_bytes` in total."""
        return num_bytes / self.rate + num_messages * self.latency


class Wires(NamedTuple):
    """The network between the workers.

    Attributes:
        outer: The link of each host.
        inner: The link between the devices of a host.
        per_host: Devices per host; with 1, every device uses the outer link.
        num_servers: Number of parameter servers, each with its own link.
    """

    outer: Link
    inner: Link
    per_host: int = 1
    num_servers: int = 1


def ring(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Ring all-reduce: 2(n-1) messages with 1/n of the bytes each, over the slowest link.

    Devices of a host are neighbors in the ring, so that 2(h-1) of the messages are sent between the
    h hosts, and the others within a host (as in NCCL's model in `tuning.cc`).
    """
    n = num_workers
    sent, messages = 2 * (n - 1) / n * num_bytes, 2 * (n - 1)
    if n <= wires.per_host:
        return wires.inner.seconds(sent, messages)
    between_hosts = 2 * (-(-n // wires.per_host) - 1)
    return (
        wires.outer.seconds(sent, between_hosts) + (messages - between_hosts) * wires.inner.latency
    )


def parameter_server(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Every worker receives weights and sends gradients. Workers share the servers' links."""
    a_link = max(1.0, num_workers / wires.num_servers) * num_bytes
    return 2 * wires.outer.seconds(a_link, 1)


def hierarchical(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """A reduction within each host, a ring over the hosts, and a broadcast within each host."""
    inside = min(num_workers, wires.per_host)
    hosts = -(-num_workers // inside)
    within = 2 * wires.inner.seconds((inside - 1) * num_bytes, 1) if inside > 1 else 0.0
    return within + (ring(num_bytes, hosts, wires._replace(per_host=1)) if hosts > 1 else 0.0)


def sharded(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Reduce-scatter and all-gather, each half a ring (Rajbhandari et al. 2020, section 7.2)."""
    return ring(num_bytes, num_workers, wires)


def sharded_further(num_bytes: float, num_workers: int, wires: Wires) -> float:
    """Three halves of a ring.

    With a sharded optimizer an all-reduce of the gradients, and an all-gather of the weights; with
    sharded parameters two all-gathers of the weights and a reduce-scatter.
    """
    return 1.5 * ring(num_bytes, num_workers, wires)


def central_storage(num_bytes: float, num_workers: int, wires: Wires) -> float | None:
    """Gradients to one device of the host, and weights from it; None for several hosts."""
    if num_workers > wires.per_host:
        return None
    return 2 * wires.inner.seconds(num_workers * num_bytes, 1)


#: By name: functions of the bytes of the gradients, the number of workers and the wires that return
#: seconds, or None if the strategy does not support it.
EXCHANGES: dict[str, Callable[[float, int, Wires], float | None]] = {
    "parameter_server": parameter_server,
    "ring": ring,
    "hierarchical": hierarchical,
    "central_storage": central_storage,
    "sharded": sharded,
    "sharded_optimizer": sharded_further,
    "sharded_parameters": sharded_further,
}
#: Fraction of the communication that cannot overlap with the backward pass: sending the updated
#: weights from servers or from the owners of shards.
_WEIGHTS = {
    "parameter_server": 1 / 2,
    "central_storage": 1 / 2,
    "sharded_optimizer": 1 / 3,
    "sharded_parameters": 1 / 3,
}
#: Strategies that always send float32.
_UNCOMPRESSED = ("sharded", "sharded_optimizer", "sharded_parameters")


class Step(NamedTuple):
    """A step of several workers.

    Attributes:
        seconds: Duration of the step.
        efficiency: Duration of the same step on a single worker, as a fraction of `seconds`.
        exchange: Communication time, including the part that overlaps with the backward pass.
    """

    seconds: float
    efficiency: float
    exchange: float


class Profile(NamedTuple):
    """The profile of a worker's step.

    Attributes:
        seconds: Compute time of its batch.
        gradient_bytes: Bytes of the gradients of all trainable weights.
        exchange_seconds: Fixed software overhead of an exchange.
        exchange_rate: Maximum bytes per second of the communication software; 0 for no limit.
    """

    seconds: float
    gradient_bytes: float
    exchange_seconds: float = 0.0
    exchange_rate: float = 0.0


#: Fraction of the compute time in the backward pass, which has twice the work of the forward pass.
_BACKWARD = 2 / 3


def step(
    strategy: str,
    profile: Profile,
    num_workers: int,
    wires: Wires,
    bucket_bytes: float = 0.0,
    compression: float = 1.0,
) -> Step | None:
    """Returns the step of several workers with equal batches, or None if it is not supported.

    Args:
        strategy: A key of `EXCHANGES`.
        profile: The profile of one worker.
        num_workers: Number of workers, from 1.
        wires: The network between them.
        bucket_bytes: Bytes of a gradient bucket, for overlap with the backward pass; 0: all
            gradients are reduced after the backward pass.
        compression: Factor by which the gradients are compressed; ignored for sharded strategies.
    """
    if num_workers == 1:
        return Step(profile.seconds, 1.0, 0.0)
    if profile.exchange_rate:  # the software limits fast links
        outer, inner = (
            link._replace(rate=min(link.rate, profile.exchange_rate))
            for link in (wires.outer, wires.inner)
        )
        wires = wires._replace(outer=outer, inner=inner)
    sent = profile.gradient_bytes / (1.0 if strategy in _UNCOMPRESSED else compression)
    transfer = EXCHANGES[strategy](sent, num_workers, wires)
    if transfer is None:
        return None
    if not bucket_bytes:
        exchange = transfer + profile.exchange_seconds
        seconds = profile.seconds + exchange
    else:
        sizes = [bucket_bytes] * int(sent // bucket_bytes)
        if sum(sizes) < sent:
            sizes.append(sent - sum(sizes))
        times = [
            (EXCHANGES[strategy](size, num_workers, wires) or 0.0) + profile.exchange_seconds
            for size in sizes
        ]
        exchange = sum(times)
        seconds = _overlapped(profile.seconds, sizes, times, _WEIGHTS.get(strategy, 0.0))
    return Step(seconds, profile.seconds / seconds, exchange)


def _overlapped(
    computing: float, sizes: Sequence[float], times: Sequence[float], weights: float
) -> float:
    """Returns the seconds of a step whose buckets are sent one by one during the backward pass.

    A bucket is sent when the backward pass has computed its gradients, at a constant number of
    bytes per second, and the previous bucket has been sent.

    Args:
        computing: Compute time of a step in seconds.
        sizes: Bytes of the buckets, in the order of the backward pass.
        times: Seconds to exchange each bucket.
        weights: Fraction of the communication that follows the backward pass.
    """
    sent = 0.0
    end = (1 - _BACKWARD) * computing
    for size, time in zip(sizes, times, strict=True):
        sent += size
        ready = computing * (1 - _BACKWARD + _BACKWARD * sent / sum(sizes))
        end = max(end, ready) + (1 - weights) * time
    return max(end, computing) + weights * sum(times)
