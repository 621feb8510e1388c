"""Measures the time, memory and communication of real training steps, in separate processes.

On CPUs, the environment variable `TF_CPU_ALLOCATOR_USE_BFC` replaces malloc, which has no
statistics, by TensorFlow's allocator for GPUs (`tensorflow/core/common_runtime/process_state.cc`).
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipelines.cores import num_bound_cores
from tfdist import devices, strategies
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.console import files
from tfdist.errors import ConfigurationError
from tfdist.run import reports
from tfdist.tools.plan.exchange import Profile
from tfdist.tools.plan.network import Workload
from tfdist.trainer import Trainer

#: Environment variables that make TensorFlow count the memory of tensors on CPUs.
MEMORY_COUNTING: Mapping[str, str] = MappingProxyType({"TF_CPU_ALLOCATOR_USE_BFC": "1"})
_TIMEOUT_SECONDS = 1800.0
#: Number of steps that `measure` times, after two for compilation.
_NUM_STEPS = 5


class Sample(NamedTuple):
    """Measurements of the steps of a process, without the first two, which compile.

    Attributes:
        seconds: Median time of a step.
        exchange: Seconds of an all-reduce of the gradients, without other computation.
        data: Seconds per step in which the devices wait for data.
        gradient_bytes: Bytes of the gradients of all trainable weights.
        peak_bytes: Peak memory of all devices of the process since its start.
        device: "CPU", or the name of the GPU.
        utilization: Of the GPU in the last second, or of all cores in the steps, 0 to 1.
    """

    seconds: float
    exchange: float
    data: float
    gradient_bytes: int
    peak_bytes: int
    device: str
    utilization: float


class StepTimes(keras.callbacks.Callback):
    """Records the time at which each step ends, and the processor time until then."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []
        self._processor: list[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.ends, self._processor = [], []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())
        self._processor.append(time.process_time())

    def seconds(self, skip: int = 0) -> float:
        """Returns the median time between two ends, without the first `skip` of them."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.ends[skip:]))

    def utilization(self, skip: int = 0) -> float:
        """Returns the part of the GPU in the last second, or of all cores, that steps used."""
        if gpus := devices.gpu_use():
            return gpus[0].busy
        busy = self._processor[-1] - self._processor[skip]
        return busy / (self.ends[-1] - self.ends[skip]) / num_bound_cores()


def pool(
    num_workers: int = 1, via: str = "", environ: Mapping[str, str] = MappingProxyType({})
) -> WorkerPool:
    """Returns processes that handle requests and respond with a `Sample`.

    A request is `(network, batch, strategy, devices, num_steps)` and optionally a mapping of the
    strategy's options.

    Args:
        num_workers: Number of processes that train together.
        via: How to start them: see `WorkerPool`.
        environ: Additional environment variables.
    """
    return WorkerPool(
        prepare, num_workers=num_workers, via=via, environ={**MEMORY_COUNTING, **environ},
        timeout_seconds=_TIMEOUT_SECONDS,
    )  # fmt: skip


def prepare() -> Callable[..., Sample]:
    """Returns the function that handles requests in a process of the pool."""
    return _sample


def _sample(
    network: Workload,
    batch: int,
    strategy: str,
    num_devices: int,
    num_steps: int,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Sample:
    created = strategies.create(strategy, num_devices, **options)
    trainer = Trainer(
        network.build, strategy=created, precision=network.precision, steps_per_call=1
    )
    data, times = tf.data.Dataset.from_tensors(network.batch(batch)).repeat(), StepTimes()
    # The first two steps compile and create the optimizer's variables.
    trainer.fit(data, steps_per_epoch=num_steps + 2, verbose=0, callbacks=[times])
    seconds, utilization = times.seconds(skip=1), times.utilization(skip=1)
    names = trainer.strategy.devices
    # Logical CPU devices share one allocator. Before `measure_exchange`, which needs more memory.
    allocators = [name for name in names if name.startswith("GPU")] or ["CPU:0"]
    peak = sum(tf.config.experimental.get_memory_info(name)["peak"] for name in allocators)
    exchanged = reports.measure_exchange(trainer.strategy, trainer.model)
    weights = trainer.model.trainable_variables
    if not names[0].startswith("GPU"):
        device = "CPU"
    else:
        (gpu, *_) = tf.config.get_visible_devices("GPU")
        device = str(tf.config.experimental.get_device_details(gpu).get("device_name", "GPU"))
    return Sample(
        seconds,
        exchanged[0] if exchanged else 0.0,
        trainer.stats.data_wait_share * seconds,
        sum(4 * int(w.value.shape.num_elements()) for w in weights),
        peak,
        device,
        utilization,
    )


def measure(network: Workload, batch: int) -> Profile:
    """Returns the profile of a worker without communication, measured in a new process.

    Args:
        network: What is trained.
        batch: Rows of a step.

    Raises:
        LaunchError: Training failed.
    """
    with pool() as processes:
        (sample,) = processes.ask(network, batch, "one_device", 1, _NUM_STEPS)
    return Profile(sample.seconds, sample.gradient_bytes)


def read(path: str) -> Profile:
    """Reads a profile that `write` wrote.

    Raises:
        ConfigurationError: The file does not exist or has an invalid format.
    """
    try:
        profile = Profile(**json.loads(Path(path).read_text("utf-8")))
        if min(profile) >= 0 < profile.seconds:
            return profile
    except FileNotFoundError:
        raise ConfigurationError(
            f"--profile {path}: there is no such file. Write one with --save-profile."
        ) from None
    except (OSError, ValueError, TypeError):
        pass
    raise ConfigurationError(
        f"--profile {path}: expected a file from --save-profile, with the fields "
        f"{', '.join(Profile._fields)}."
    )


def write(measured: Profile, path: str) -> None:
    """Writes a profile as JSON."""
    with files.replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(measured._asdict(), indent=1) + "\n")
