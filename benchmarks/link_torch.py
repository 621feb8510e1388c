"""A process of `benchmarks link` with PyTorch: DDP and FSDP over Gloo.

    python -m benchmarks.link_torch - RANK ADDRESSES BATCH

The arguments are those of `link_worker`; the first address is that of rank 0.
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

from benchmarks import link_protocol, torch_training
from benchmarks.link_protocol import NETWORK, Times


def main(rank: int, addresses: list[str], batch_size: int) -> None:
    """Joins the other processes and answers questions."""
    link_protocol.use_own_core(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "wire"
    link_protocol.announce()
    torch_training.join(addresses[0], rank, len(addresses))
    workload = dataclasses.replace(NETWORK, batch_size=batch_size)
    sizes = _layers(torch_training.network(workload))
    largest, total = max(sizes), sum(sizes)

    def steps(wrap: torch_training.Wrap) -> Callable[[], Times]:
        step = torch_training.step(workload, wrap)
        return lambda: link_protocol.timed(step, workload.num_steps)

    ones = torch.ones(total // 4)
    measures = {
        link_protocol.COMPUTE: steps(lambda net: net),
        link_protocol.SEND: lambda: link_protocol.timed(
            lambda: dist.all_reduce(ones), link_protocol.NUM_SENDS
        ),
        link_protocol.AT_ONCE: steps(_in_buckets(total)),
        # As with `--bucket-mb auto`, each layer of this network is a bucket.
        link_protocol.IN_BUCKETS: steps(_in_buckets(largest)),
        link_protocol.GRADIENTS: steps(_sharded(reshards=False)),
        link_protocol.PARAMETERS: steps(_sharded(reshards=True)),
    }
    link_protocol.serve(measures, sizes[::-1])
    dist.destroy_process_group()


def _layers(net: nn.Module) -> list[int]:
    """Returns the bytes of the weights of each layer."""
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    return [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]


def _in_buckets(num_bytes: int) -> torch_training.Wrap:
    """DDP with buckets of `num_bytes`."""
    return lambda net: nn.parallel.DistributedDataParallel(net, bucket_cap_mb=num_bytes / (1 << 20))


def _sharded(reshards: bool) -> torch_training.Wrap:
    """FSDP, with a group for each layer.

    Args:
        reshards: Whether a layer's weights are freed after the forward pass and gathered again for
            the backward pass (ZeRO 3), or kept (ZeRO 2).
    """

    def shard(net: nn.Module) -> nn.Module:
        for layer in list(net.modules()):
            if isinstance(layer, nn.Linear):
                fully_shard(layer, reshard_after_forward=reshards)
        return fully_shard(net, reshard_after_forward=reshards)

    return shard


if __name__ == "__main__":
    main(int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]))
