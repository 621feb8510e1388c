"""What a real training step held at most, by TensorFlow's own allocator, in a process of its own.

On a CPU the allocator of GPUs is put in the place of malloc, which counts nothing and knows no
limit: the environment of the process says so (`tensorflow/core/common_runtime/process_state.cc`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tfdist.launcher.worker_pool import WorkerPool
from tfdist.plan.memory.network import Network

#: Steps that are made: the first makes what later ones hold.
_NUM_STEPS = 3
_SECONDS = 500.0
#: What has the CPU's tensors counted.
_COUNTED: Mapping[str, str] = MappingProxyType({"TF_CPU_ALLOCATOR_USE_BFC": "1"})


def measured(
    network: Network, num_rows: int, strategy: str = "one_device", devices: int = 1
) -> int:
    """Returns the bytes that a process held at most while it trained, over all its devices.

    Args:
        network: What is trained.
        num_rows: Of a global batch.
        strategy: One of a single process.
        devices: Its replicas.

    Raises:
        LaunchError: The training failed, as where memory did not suffice.
    """
    with WorkerPool(
        _prepare, num_workers=1, via="", environ=_COUNTED, answer_seconds=_SECONDS
    ) as pool:
        (peak,) = pool.ask(network, num_rows, strategy, devices)
    return int(peak)


def _prepare() -> Callable[[Network, int, str, int], int]:
    """In the process: returns what trains, and says what was held."""
    import tensorflow as tf

    from tfdist.trainer import Trainer

    def peak(network: Network, num_rows: int, strategy: str, devices: int) -> int:
        trainer = Trainer(
            network.build, strategy=strategy, devices=devices, precision=network.precision
        )
        data = tf.data.Dataset.from_tensors(network.batch(num_rows)).repeat()
        trainer.fit(data, epochs=1, steps_per_epoch=_NUM_STEPS, verbose=0)
        names = [d for d in trainer.strategy.devices if d.startswith("GPU")] or ["CPU:0"]
        return sum(tf.config.experimental.get_memory_info(name)["peak"] for name in names)

    return peak
