"""Real training steps of a network, in processes of their own: their time and what they hold.

On a CPU the allocator of GPUs is put in the place of malloc, which counts nothing and knows no
limit: the environment of the process says so (`tensorflow/core/common_runtime/process_state.cc`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tfdist.launcher.worker_pool import WorkerPool
from tfdist.plan.network import Network

_SECONDS = 1800.0
_COUNTED = {"TF_CPU_ALLOCATOR_USE_BFC": "1"}


class Sample(NamedTuple):
    """What steps of a process took, after those that compile.

    Attributes:
        seconds: Of a step, the median.
        exchange: Seconds of them that a sum of the gradients takes by itself.
        data: Seconds of them in which the devices waited for data.
        gradient_bytes: Of all trainable weights.
        peak_bytes: The most that all devices of the process held, since it began.
        device: The kind, and where it is a GPU its name.
    """

    seconds: float
    exchange: float
    data: float
    gradient_bytes: int
    peak_bytes: int
    device: str


def pool(
    num_workers: int = 1, via: str = "", environ: Mapping[str, str] = MappingProxyType({})
) -> WorkerPool:
    """Returns processes that answer `(network, batch, strategy, devices, num_steps)` by a `Sample`.

    Options of the strategy may follow.

    Args:
        num_workers: Processes that train together.
        via: What starts several.
        environ: Variables of theirs.
    """
    return WorkerPool(
        prepare, num_workers=num_workers, via=via, environ={**_COUNTED, **environ},
        answer_seconds=_SECONDS,
    )  # fmt: skip


def prepare() -> Callable[..., Sample]:
    """In a process: returns what trains and looks at the clock."""
    import keras
    import tensorflow as tf

    from tfdist import strategies
    from tfdist.run import profile
    from tfdist.trainer import Trainer

    class Clock(keras.callbacks.Callback):
        """Takes the time of each step."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    def sample(
        network: Network,
        batch: int,
        strategy: str,
        devices: int,
        num_steps: int,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Sample:
        made = strategies.create(strategy, devices, **options)
        trainer = Trainer(
            network.build, strategy=made, precision=network.precision, steps_per_call=1
        )
        data, clock = tf.data.Dataset.from_tensors(network.batch(batch)).repeat(), Clock()
        # Two steps that compile and make the optimizer's variables, then those that count.
        trainer.fit(data, steps_per_epoch=num_steps + 2, verbose=0, callbacks=[clock])
        ends = clock.ends[1:]
        seconds = statistics.median(b - a for a, b in itertools.pairwise(ends))
        peak = sum(map(_peak, _names(trainer.strategy.devices)))  # the exchange below holds more
        exchanged = profile.exchange(trainer.strategy, trainer.model)
        weights = trainer.model.trainable_variables
        return Sample(
            seconds,
            exchanged[0] if exchanged else 0.0,
            trainer.stats.data_wait_share * seconds,
            sum(4 * int(w.value.shape.num_elements()) for w in weights),
            peak,
            _device(trainer.strategy.devices[0]),
        )

    return sample


def _names(devices: list[str]) -> list[str]:
    """The devices that count for themselves: logical ones of a CPU share an allocator."""
    return [name for name in devices if name.startswith("GPU")] or ["CPU:0"]


def _peak(name: str) -> int:
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info(name)["peak"])


def _device(name: str) -> str:
    import tensorflow as tf

    if not name.startswith("GPU"):
        return "CPU"
    (gpu, *_) = tf.config.get_visible_devices("GPU")
    return str(tf.config.experimental.get_device_details(gpu).get("device_name", "GPU"))
