"""A process of `bench scaling --link`: measures what each line of its input names, in milliseconds.

    python -m tfdist.bench.scaling.link_worker STRATEGY RANK ADDRESSES BATCH

ADDRESSES are those of all workers, by rank, with commas between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist import cluster, strategies
from tfdist.bench.scaling.over_link import AT_ONCE, COMPUTE, IN_BUCKETS, NETWORK, SEND
from tfdist.bench.step.contenders import Case, in_loop
from tfdist.bench.step.workloads import Workload
from tfdist.launcher import horovod
from tfdist.launcher.plan import Slot
from tfdist.strategies.collectives import buckets
from tfdist.strategies.collectives.bandwidth import measure

_SENDS = 3


def main(strategy: str, rank: int, addresses: list[str], batch_size: int) -> None:
    """Joins the others, says what there is to send, and measures as often as it is told to."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # One that waits for others must not keep the rest from going on.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    with _told(strategy, rank, addresses):
        print("here", flush=True)
        joined = strategies.create(strategy, 1)
        alone = dataclasses.replace(NETWORK, batch_size=batch_size)
        both = dataclasses.replace(NETWORK, batch_size=batch_size * len(addresses))
        gradients = {
            i: tf.zeros(v.shape) for i, v in enumerate(alone.build_model().trainable_variables)
        }
        sizes = {i: int(tf.size(g)) * g.dtype.size for i, g in gradients.items()}
        num_bytes = sum(sizes.values())
        measures: dict[str, Callable[[], float]] = {
            COMPUTE: _by_itself(alone),
            SEND: lambda: 1e3 * measure(joined, num_bytes, _SENDS)[0],
            AT_ONCE: _trained(both, joined, None),
            IN_BUCKETS: _trained(both, joined, "auto"),
        }
        for warm_up in measures.values():
            warm_up()
        division = buckets.in_order(gradients, "auto")
        last = sum(sizes[i] for i in division[-1])
        facts = {"bytes": num_bytes, "buckets": len(division), "last_bucket": last / num_bytes}
        print(json.dumps(facts), flush=True)
        for line in sys.stdin:
            print(measures[line.strip()](), flush=True)


@contextlib.contextmanager
def _told(strategy: str, rank: int, addresses: Sequence[str]) -> Iterator[None]:
    """Tells this process of the others, as a launcher does that starts them on these hosts."""
    if strategy == "multi_worker":
        cluster.use(cluster.discover(workers=list(addresses), rank=rank))
        yield
        return
    hosts, size = [address.rpartition(":")[0] for address in addresses], len(addresses)
    slots = [Slot(host, i, size, 0, 1, i, size) for i, host in enumerate(hosts)]
    port = int(addresses[0].rpartition(":")[2])
    os.environ.update(horovod.environ(slots[rank], hosts[0], port, "wire"))
    with horovod.serving(slots, port) if rank == 0 else contextlib.nullcontext():
        yield


def _by_itself(workload: Workload) -> Callable[[], float]:
    """Returns what trains on this process's share, with no word to the others."""
    me = cluster.current()
    cluster.leave()
    step = in_loop(Case("mlp", workload, strategies.create("one_device", 1), workload.num_steps))
    cluster.use(me)
    return lambda: step().ms


def _trained(
    workload: Workload, joined: strategies.Strategy, bucket_bytes: str | None
) -> Callable[[], float]:
    """Returns what trains with buckets of a size."""
    step = in_loop(Case("mlp", workload, joined, workload.num_steps))

    def measure_step() -> float:
        joined.bucket_bytes = bucket_bytes  # looked at whenever a step is traced
        return step().ms

    return measure_step


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]))
