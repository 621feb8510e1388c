"""A process of `bench scaling --link`: measures what each line of its input names.

    python -m tfdist.bench.scaling.link_worker STRATEGY RANK ADDRESSES BATCH

ADDRESSES are those of all workers, by rank, with commas between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist import cluster, strategies
from tfdist.bench.scaling import link_answers as answers
from tfdist.bench.scaling.over_link import NETWORK
from tfdist.bench.step.contenders import Case, in_loop
from tfdist.bench.step.workloads import Workload
from tfdist.launcher import horovod
from tfdist.launcher.plan import Slot
from tfdist.strategies.collectives import buckets

_SHARDS = {answers.GRADIENTS: "gradients", answers.PARAMETERS: "parameters"}


def main(strategy: str, rank: int, addresses: list[str], batch_size: int) -> None:
    """Joins the others, says what there is to send, and measures as often as it is told to."""
    answers.take_own_core(rank)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # One that waits for others must not keep the rest from going on.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    with _told(strategy, rank, addresses):
        answers.say_here()
        joined = strategies.create(strategy, 1)
        alone = dataclasses.replace(NETWORK, batch_size=batch_size)
        both = dataclasses.replace(NETWORK, batch_size=batch_size * len(addresses))
        gradients = {
            i: tf.zeros(v.shape) for i, v in enumerate(alone.build_model().trainable_variables)
        }
        sizes = {i: int(tf.size(g)) * g.dtype.size for i, g in gradients.items()}
        measures = {
            answers.COMPUTE: _by_itself(alone),
            answers.SEND: _sent(joined, sum(sizes.values())),
            answers.AT_ONCE: _trained(both, joined, None),
            answers.IN_BUCKETS: _trained(both, joined, "auto"),
        }
        if strategy == "horovod":
            for name, shard in _SHARDS.items():
                made = strategies.create("sharded", 1, shard=shard)
                measures[name] = _trained(both, made, made.bucket_bytes)
        order = buckets.in_order(gradients, "auto")
        answers.serve(measures, [sum(sizes[i] for i in bucket) for bucket in order])


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


def _by_itself(workload: Workload) -> Callable[[], answers.Taken]:
    """Returns what trains on this process's share, with no word to the others."""
    me = cluster.current()
    cluster.leave()
    case = Case("mlp", workload, strategies.create("one_device", 1), workload.num_steps)
    measure = _steps(case)
    cluster.use(me)
    return measure


def _trained(
    workload: Workload, joined: strategies.Strategy, bucket_bytes: str | int | None
) -> Callable[[], answers.Taken]:
    """Returns what trains with buckets of a size."""
    measure = _steps(Case("mlp", workload, joined, workload.num_steps))

    def measure_step() -> answers.Taken:
        joined.bucket_bytes = bucket_bytes  # looked at whenever a step is traced
        return measure()

    return measure_step


def _steps(case: Case) -> Callable[[], answers.Taken]:
    step = in_loop(case)

    def measure() -> answers.Taken:
        sample = step()
        return answers.Taken(sample.ms, sample.cpu_ms)

    return measure


def _sent(joined: strategies.Strategy, num_bytes: int) -> Callable[[], answers.Taken]:
    """Returns what sums as many bytes of float32 over the workers."""
    ones = tf.ones([num_bytes // 4])

    @tf.function
    def total() -> list[tf.Tensor]:
        # One tensor a replica: TensorFlow takes what all of them share for summed already.
        sums = joined.run(lambda _: joined.all_reduce([tf.identity(ones)]))
        return joined.local_results(sums)  # whole: the rest is not computed

    # A number of the sum waits for it.
    return lambda: answers.timed(lambda: float(total()[0][0][0]), answers.NUM_SENDS)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]))
