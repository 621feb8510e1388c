"""A process of `benchmarks link` with tfdist: measures what each line of its input names.

    python -m benchmarks.link_worker STRATEGY RANK ADDRESSES BATCH

ADDRESSES are those of all workers by rank, separated by commas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from benchmarks import link_protocol
from benchmarks.link_protocol import NETWORK, Times
from tfdist import cluster, strategies
from tfdist.cluster.launcher import plan
from tfdist.cluster.launcher.plan import Slot
from tfdist.groups import buckets
from tfdist.tools.bench.contenders import Case, fit_by_tfdist
from tfdist.tools.bench.workloads import Workload

_SHARDS = {link_protocol.GRADIENTS: "gradients", link_protocol.PARAMETERS: "parameters"}


def main(strategy: str, rank: int, addresses: list[str], batch_size: int) -> None:
    """Joins the other processes and answers questions."""
    link_protocol.use_own_core(rank)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Two, so that an operation that waits for the other worker does not block the rest.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    with _joined(strategy, rank, addresses):
        link_protocol.announce()
        joined = strategies.create(strategy, 1)
        alone = dataclasses.replace(NETWORK, batch_size=batch_size)
        both = dataclasses.replace(NETWORK, batch_size=batch_size * len(addresses))
        gradients = {
            i: tf.zeros(v.shape) for i, v in enumerate(alone.build_model().trainable_variables)
        }
        sizes = {i: int(tf.size(g)) * g.dtype.size for i, g in gradients.items()}
        measures = {
            link_protocol.COMPUTE: _alone(alone),
            link_protocol.SEND: _sent(joined, sum(sizes.values())),
            link_protocol.AT_ONCE: _trained(both, joined, None),
            link_protocol.IN_BUCKETS: _trained(both, joined, "auto"),
        }
        if strategy == "horovod":
            for name, shard in _SHARDS.items():
                sharded_strategy = strategies.create("sharded", 1, shard=shard)
                measures[name] = _trained(
                    both, sharded_strategy, sharded_strategy.exchange.bucket_bytes
                )
        order = buckets.in_order(gradients, "auto")
        link_protocol.serve(measures, [sum(sizes[i] for i in bucket) for bucket in order])


@contextlib.contextmanager
def _joined(strategy: str, rank: int, addresses: Sequence[str]) -> Iterator[None]:
    """Describes the job to this process, as a launcher would."""
    if strategy == "multi_worker":
        cluster.use(cluster.discover(workers=list(addresses), rank=rank))
        yield
        return
    hosts, size = [address.rpartition(":")[0] for address in addresses], len(addresses)
    slots = [Slot(host, i, size, 0, 1, i, size) for i, host in enumerate(hosts)]
    port = int(addresses[0].rpartition(":")[2])
    os.environ.update(plan.horovod_environ(slots[rank], hosts[0], port, "wire"))
    with plan.horovod_rendezvous(slots, port) if rank == 0 else contextlib.nullcontext():
        yield


def _alone(workload: Workload) -> Callable[[], Times]:
    """Returns what trains on this process's batch without an exchange."""
    me = cluster.current()
    cluster.leave()
    case = Case("mlp", workload, strategies.create("one_device", 1), workload.num_steps)
    measure = _steps(case)
    cluster.use(me)
    return measure


def _trained(
    workload: Workload, joined: strategies.Strategy, bucket_bytes: str | int | None
) -> Callable[[], Times]:
    """Returns what trains with gradient buckets of a size."""
    measure = _steps(Case("mlp", workload, joined, workload.num_steps))

    def measure_step() -> Times:
        joined.exchange.bucket_bytes = bucket_bytes  # read whenever a step is traced
        return measure()

    return measure_step


def _steps(case: Case) -> Callable[[], Times]:
    step = fit_by_tfdist(case)

    def measure() -> Times:
        sample = step()
        return Times(sample.ms, sample.cpu_ms)

    return measure


def _sent(joined: strategies.Strategy, num_bytes: int) -> Callable[[], Times]:
    """Returns what sums `num_bytes` of float32 over the workers."""
    ones = tf.ones([num_bytes // 4])

    @tf.function
    def total() -> list[tf.Tensor]:
        # tf.identity: TensorFlow treats a tensor that all replicas share as already summed.
        sums = joined.run(lambda _: joined.all_reduce([tf.identity(ones)]))
        return joined.local_results(sums)  # all of them: TensorFlow prunes the rest

    # Reading an element waits for the sum.
    return lambda: link_protocol.timed(lambda: float(total()[0][0][0]), link_protocol.NUM_SENDS)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]))
