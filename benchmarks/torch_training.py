"""The networks of `tfdist.tools.bench.scaling`, trained by PyTorch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tfdist.tools.bench.workloads import NUM_CLASSES, Workload

#: Wraps a network so that its gradients are exchanged between processes.
Wrap = Callable[[nn.Module], nn.Module]


def join(address: str, rank: int, size: int) -> None:
    """Joins the process group over Gloo; `address` is one of rank 0."""
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size)


def prepare(workload: Workload, joined: bool) -> Callable[[int], float]:
    """Returns what trains for a number of steps and returns the milliseconds of one."""
    one = step(workload, nn.parallel.DistributedDataParallel if joined else lambda net: net)

    def train(num_steps: int) -> float:
        began = time.perf_counter()
        for _ in range(num_steps):
            one()
        return 1e3 * (time.perf_counter() - began) / num_steps

    return train


def step(workload: Workload, wrap: Wrap) -> Callable[[], None]:
    """Returns what trains for one step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = wrap(network(workload))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    loss_of, random = nn.CrossEntropyLoss(), np.random.default_rng(0)
    *sides, channels = workload.input_shape
    shape = (workload.batch_size, channels, *sides)
    x = torch.from_numpy(random.random(shape, np.float32))
    y = torch.from_numpy(random.integers(0, NUM_CLASSES, workload.batch_size))

    def train() -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    return train


def network(workload: Workload) -> nn.Module:
    """Returns the network of a workload."""
    return _cnn(workload) if workload.model == "cnn" else _mlp(workload)


def _mlp(workload: Workload) -> nn.Module:
    """The network of `tfdist.models.mlp`."""
    sizes = [workload.input_shape[0], *workload.options["units"]]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], NUM_CLASSES))


def _cnn(workload: Workload) -> nn.Module:
    """The default network of `tfdist.models.cnn`."""
    layers: list[nn.Module] = []
    filters = (32, 64, 128)
    sizes = itertools.pairwise((workload.input_shape[-1], *filters))
    for number, (before, after) in enumerate(sizes):
        layers += [nn.MaxPool2d(2)] if number else []
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(filters[-1], 192), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(192, NUM_CLASSES))
