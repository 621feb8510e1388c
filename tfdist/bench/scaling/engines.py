"""The engines that are compared: how their workers are started, and what those measure.

Every worker has one core to itself, and one thread to compute with.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tfdist import cluster
from tfdist.bench.step.workloads import WORKLOADS, Workload
from tfdist.cluster.ports import free_ports
from tfdist.launcher.worker_pool import WorkerPool

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

#: Takes a model, a way to train it and a number of steps; returns milliseconds per step.
Measure = Callable[[str, str, int], float]

OURS, BY_HAND = "tfdist", "by hand"

#: What is trained; the batch is one worker's.
MODELS = {
    # Much arithmetic, few weights: 120,000 of them.
    "cnn": dataclasses.replace(WORKLOADS["cnn"], input_shape=(32, 32, 1), num_steps=8),
    # Little arithmetic and a gradient of 25 million numbers, 100 MB.
    "dense": Workload(
        "mlp", {"units": (4096, 4096)}, (2048,), "float32", 64, 3, {"units": (64, 64)}
    ),
}


class Engine(NamedTuple):
    """Workers, and what they are compared with.

    Attributes:
        start: Starts them.
        ways: To train.
        apart: The engine with as many processes that exchange nothing; itself where it is that.
        alone: The engine with one process.
    """

    start: Callable[[bool], WorkerPool]
    ways: tuple[str, ...]
    apart: str
    alone: str


def of_tfdist(strategy: str, tiny: bool) -> Measure:
    """In a worker: starts a strategy; trains through it, and by hand through what it stands on."""
    _own_core()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    # One that waits for others must not keep the rest from going on.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    from tfdist import strategies

    if strategy == "one_device":  # also of several: those are apart
        cluster.leave()
    made = strategies.create(strategy, 1)

    @functools.cache
    def prepared(model: str, way: str, num_steps: int) -> Callable[[], Any]:
        from tfdist.bench.step.contenders import Case, hand_written, in_loop

        by_hand = way == BY_HAND
        joined = hasattr(made, "tf_strategy")
        # TensorFlow, and tfdist, take shares of the global batch; Horovod is given them.
        workers = 1 if by_hand and not joined else made.num_workers
        workload = _workload(model, tiny)
        workload = dataclasses.replace(workload, batch_size=workload.batch_size * workers)
        case = Case(model, workload, made, num_steps, None if joined else _exchange(made))
        return hand_written(case) if by_hand else in_loop(case)

    return lambda model, way, num_steps: prepared(model, way, num_steps)().ms


def of_torch(port: int, joined: bool, tiny: bool) -> Measure:
    """In a worker: trains the same networks by PyTorch; `joined`: through DDP over Gloo."""
    _own_core()
    from tfdist.bench.scaling import by_torch

    if joined:
        me = cluster.discover()
        by_torch.join(f"127.0.0.1:{port}", me.rank, me.size)
    prepared = functools.cache(lambda model: by_torch.prepare(_workload(model, tiny), joined))
    return lambda model, way, num_steps: prepared(model)(num_steps)


def _own_core() -> None:
    """Keeps this process on the core of its rank."""
    import psutil

    process = psutil.Process()
    cores = process.cpu_affinity()
    process.cpu_affinity([cores[cluster.discover().rank % len(cores)]])


def _workload(model: str, tiny: bool) -> Workload:
    return MODELS[model].tiny() if tiny else MODELS[model]


def _exchange(strategy: Strategy) -> Any:
    """How Horovod's users take means of gradients."""
    if strategy.num_workers == 1:
        return None
    import horovod.tensorflow as hvd

    return functools.partial(hvd.grouped_allreduce, op=hvd.Average)


def _tfdist(strategy: str, **options: Any) -> Callable[[bool], WorkerPool]:
    return lambda tiny: WorkerPool(of_tfdist, strategy, tiny, **options)


def _torch(joined: bool, num_workers: int) -> Callable[[bool], WorkerPool]:
    def start(tiny: bool) -> WorkerPool:
        port = free_ports(1)[0]
        return WorkerPool(of_torch, port, joined, tiny, num_workers=num_workers, pauses=True)

    return start


_BOTH = (OURS, BY_HAND)
_ALONE, _APART = "one process", "two apart"
_TORCH_ALONE, _TORCH_APART = "PyTorch, one process", "PyTorch, two apart"

ENGINES = {
    _ALONE: Engine(_tfdist("one_device", num_workers=1, pauses=True), _BOTH, _ALONE, _ALONE),
    _APART: Engine(_tfdist("one_device", pauses=True), (OURS,), _APART, _ALONE),
    "multi_worker": Engine(_tfdist("multi_worker"), _BOTH, _APART, _ALONE),
    "Horovod, MPI": Engine(_tfdist("horovod", via="mpirun", pauses=True), _BOTH, _APART, _ALONE),
    "Horovod, Gloo": Engine(_tfdist("horovod"), _BOTH, _APART, _ALONE),
    _TORCH_ALONE: Engine(_torch(False, 1), (BY_HAND,), _TORCH_ALONE, _TORCH_ALONE),
    _TORCH_APART: Engine(_torch(False, 2), (BY_HAND,), _TORCH_APART, _TORCH_ALONE),
    "PyTorch, Gloo": Engine(_torch(True, 2), (BY_HAND,), _TORCH_APART, _TORCH_ALONE),
}
