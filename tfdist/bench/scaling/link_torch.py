"""A process of `bench scaling --link` by PyTorch: DDP and FSDP over Gloo.

    python -m tfdist.bench.scaling.link_torch - RANK ADDRESSES BATCH

As `link_worker`; rank 0 meets the others at its address.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tfdist.bench.scaling import by_torch
from tfdist.bench.scaling import link_answers as answers
from tfdist.bench.scaling.over_link import NETWORK


def main(rank: int, addresses: list[str], batch_size: int) -> None:
    """Joins the others, says what there is to send, and measures as often as it is told to."""
    answers.take_own_core(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "wire"
    answers.say_here()
    by_torch.join(addresses[0], rank, len(addresses))
    workload = dataclasses.replace(NETWORK, batch_size=batch_size)
    sizes = _layers(by_torch.network(workload))
    largest, total = max(sizes), sum(sizes)

    def steps(joined: by_torch.Join) -> Callable[[], answers.Taken]:
        step = by_torch.step(workload, joined)
        return lambda: answers.timed(step, workload.num_steps)

    ones = torch.ones(total // 4)
    measures = {
        answers.COMPUTE: steps(lambda net: net),
        answers.SEND: lambda: answers.timed(lambda: dist.all_reduce(ones), answers.NUM_SENDS),
        answers.AT_ONCE: steps(_in_buckets(total)),
        # As `--bucket-mb auto` does of this network: each layer by itself.
        answers.IN_BUCKETS: steps(_in_buckets(largest)),
        answers.GRADIENTS: steps(_sharded(joins_again=False)),
        answers.PARAMETERS: steps(_sharded(joins_again=True)),
    }
    answers.serve(measures, sizes[::-1])
    dist.destroy_process_group()


def _layers(net: nn.Module) -> list[int]:
    """Returns the bytes of each layer that has weights."""
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    return [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]


def _in_buckets(num_bytes: int) -> by_torch.Join:
    """DDP, with buckets that are full with as many bytes."""
    return lambda net: nn.parallel.DistributedDataParallel(net, bucket_cap_mb=num_bytes / (1 << 20))


def _sharded(joins_again: bool) -> by_torch.Join:
    """FSDP, layer by layer.

    Args:
        joins_again: Whether a layer's weights are given up after the forward pass, and joined again
            for the way back (ZeRO 3), or kept (ZeRO 2).
    """

    def shard(net: nn.Module) -> nn.Module:
        for layer in list(net.modules()):
            if isinstance(layer, nn.Linear):
                fully_shard(layer, reshard_after_forward=joins_again)
        return fully_shard(net, reshard_after_forward=joins_again)

    return shard


if __name__ == "__main__":
    main(int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]))
