"""`python -m benchmarks memory`: memory of training: one device, replicated and sharded.

Each variant trains in its own processes. On CPUs TensorFlow's allocator for GPUs replaces
malloc, which counts nothing. Logical CPU devices share it, so it reports all of them together;
variables are counted for each device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.console import units
from tfdist.tools.bench import harness

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

DESCRIPTION = "memory and traffic of training: one device, replicated and sharded"

_SHARDED = ("optimizer", "gradients", "parameters")
#: Strategies that keep each weight on one device.
_SPLIT = ("tensor_parallel", "pipeline")
_TIMEOUT_SECONDS = 900.0
_ROWS, _STEPS = 8, 3
#: Layers have a multiple of this number of units, because odd sizes get larger chunks from the
#: allocator.
_MULTIPLE = 64


class Contender(NamedTuple):
    """A strategy to measure.

    Attributes:
        strategy: Name of the strategy.
        options: Options of the strategy.
        in_processes: Whether each replica is a process.
    """

    strategy: str
    options: Mapping[str, Any]
    in_processes: bool = False

    @property
    def shard(self) -> str:
        """What is divided, or an empty string."""
        return self.options.get("shard", "")


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "one_device": Contender("one_device", {}),
        "mirrored": Contender("mirrored", {}),
        "tensor_parallel": Contender("tensor_parallel", {}),
        "pipeline": Contender("pipeline", {"micro_batches": 4}),
        **{f"sharded {what}": Contender("sharded", {"shard": what}) for what in _SHARDED},
        "sharded optimizer, offloaded": Contender(
            "sharded", {"shard": "optimizer", "offload": "optimizer"}
        ),
        "horovod": Contender("horovod", {}, True),
        **{
            f"sharded {what}, processes": Contender("sharded", {"shard": what}, True)
            for what in _SHARDED
        },
    }
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--weights", type=PositiveInt, default=100_000_000, metavar="N",
        help="approximate number of weights; Adam keeps two more numbers for each",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=PositiveInt, default=24, metavar="N", help="number of equal layers"
    )
    parser.add_argument(
        "--devices", type=PositiveInt, default=2, metavar="N", help="number of replicas"
    )
    parser.add_argument(
        "--limit", type=PositiveInt, metavar="MB",
        help="train whole and sharded with this memory limit for each process instead",
    )  # fmt: skip
    harness.add_arguments(parser)


def run(
    weights: int, layers: int, devices: int, limit: int | None, output: harness.Output, smoke: bool
) -> None:
    """Measures and prints tables; the arguments are the values of the flags.

    Raises:
        LaunchError: A training failed.
    """
    if smoke:
        weights, layers = 100_000, 2
    if limit is not None:
        from benchmarks import memory_limit

        results = memory_limit.compare(weights, layers, devices, limit)
        memory_limit.show(results, output)
    else:
        results = _measure_all(weights, layers, devices, smoke, output)
    output.conclude(results)


def measure(contender: str, weights: int, layers: int, devices: int) -> dict[str, Any]:
    """Returns the bytes that a variant holds, and that each process sends per step.

    Raises:
        LaunchError: The training failed.
    """
    from tfdist.tools.plan.step_profile import MEMORY_COUNTING

    in_processes = CONTENDERS[contender].in_processes
    number = 1 if contender == "one_device" else devices
    with WorkerPool(
        _prepare,
        contender,
        1 if in_processes else number,
        num_workers=number if in_processes else 1,
        via="processes" if in_processes else "",
        environ=MEMORY_COUNTING,
        timeout_seconds=_TIMEOUT_SECONDS,
    ) as pool:
        answers = pool.ask(weights, layers)
    parameters = answers[0]["parameters"]
    return {
        "contender": contender,
        "devices": number,
        "parameters": parameters,
        "rest": sum(one["rest"] for one in answers),
        "step": sum(one["step"] for one in answers),
        "step_of_process": [one["step"] for one in answers],
        "sent": max(one["sent"] for one in answers),
        "largest": max(max(one["by_device"].values()) for one in answers),
    } | expected(contender, parameters, number)


def expected(contender: str, parameters: int, devices: int) -> dict[str, int]:
    """Returns the bytes that float32 and Adam imply: 4 per weight, 8 of moments, 4 of gradients.

    As ZeRO counts them (Rajbhandari et al. 2020, sections 3 and 7): the weights that the optimizer
    changes are 4 more where each device reads a copy of its own. A process sends (n - 1) / n of all
    weights or gradients twice: in an all-reduce, or in a reduce-scatter and an all-gather; sharded
    optimizer state and sharded weights take one more all-gather.

    Args:
        contender: A name out of `CONTENDERS`.
        parameters: Number of weights.
        devices: Number of replicas.

    Returns:
        For all devices together: `expected_rest`, and with the gradients `expected_step`. For each
        process: `expected_sent` in a step, at most.
    """
    chosen = CONTENDERS[contender]
    state = 12 * devices
    if chosen.strategy in _SPLIT:
        state, devices = 12, 1
    if chosen.shard:
        state = 12 if chosen.shard == "parameters" else 4 * devices + 12
    gradients = 4 if chosen.shard in ("gradients", "parameters") else 4 * devices
    times = 3 if chosen.shard in ("optimizer", "parameters") else 2
    sent = times * 4 * (devices - 1) / devices if chosen.in_processes else 0
    return {
        "expected_rest": state * parameters,
        "expected_step": (state + gradients) * parameters,
        "expected_sent": round(sent * parameters),
    }


def width(weights: int, layers: int) -> int:
    """Returns the units of each layer for about `weights` weights in total."""
    return _MULTIPLE * max(1, round(math.sqrt(weights / layers) / _MULTIPLE))


def network(width: int, layers: int) -> keras.Model:
    """Returns a compiled model of equal dense layers, with Adam."""
    import keras

    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(width, "tanh", use_bias=False) for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *dense])
    # With an epsilon of 1e-7 Adam would amplify the rounding of the smallest gradients.
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-2), "mse")
    return model


def batches(width: int) -> tf.data.Dataset:
    """Returns a data set that repeats one batch."""
    import tensorflow as tf

    x = tf.random.stateless_normal([_ROWS, width], seed=(0, 1))
    return tf.data.Dataset.from_tensors((x, tf.tanh(x))).repeat()


def _measure_all(
    weights: int, layers: int, devices: int, smoke: bool, output: harness.Output
) -> list[dict[str, Any]]:
    """Measures all contenders, and the memory of activations."""
    from benchmarks import memory_activations
    from tfdist.tools.install_horovod import requirements

    rows, units = (256, 32) if smoke else (4096, 256)
    results = [
        measure(name, weights, layers, devices)
        for name, contender in CONTENDERS.items()
        if not contender.in_processes or requirements.horovod_version() is not None
    ]
    _show(results, output)
    held = [memory_activations.measure(one, rows, units) for one in memory_activations.CONTENDERS]
    memory_activations.show(held, output)
    return results + held


def _prepare(contender: str, devices: int) -> Callable[[int, int], dict[str, Any]]:
    """In a process: returns what trains and returns what is held there."""
    import tensorflow as tf

    from tfdist import strategies
    from tfdist.groups import traffic
    from tfdist.strategies.sharded.plan import bytes_by_device
    from tfdist.trainer import Trainer

    chosen = CONTENDERS[contender]
    strategy = strategies.create(chosen.strategy, devices, **chosen.options)

    def answer(weights: int, layers: int) -> dict[str, Any]:
        units = width(weights, layers)
        trainer = Trainer(functools.partial(network, units, layers), strategy)
        data = batches(units)
        with traffic.counted(strategy.group.size) as sent:
            trainer.fit(data, steps_per_epoch=1, verbose=0)
            before = sent.num_bytes()
            tf.config.experimental.reset_memory_stats("CPU:0")
            trainer.fit(data, steps_per_epoch=_STEPS, verbose=0)
        counted = tf.config.experimental.get_memory_info("CPU:0")
        variables = trainer.model.trainable_variables + trainer.model.optimizer.variables
        return {
            "parameters": trainer.model.count_params(),
            "rest": counted["current"],
            "step": counted["peak"],
            "sent": (sent.num_bytes() - before) / _STEPS,
            "by_device": bytes_by_device(variables),
        }

    return answer


def _show(results: Sequence[dict[str, Any]], output: harness.Output) -> None:
    """Prints bytes per weight at rest, in a step and sent, beside the expected ones."""
    columns = ("rest", "expected_rest", "step", "expected_step", "sent", "expected_sent")
    rows = [
        (
            one["contender"],
            str(one["devices"]),
            *(f"{one[name] / one['parameters']:.1f}" for name in columns),
            units.format_bytes(one["largest"]),
        )
        for one in results
    ]
    output.show(
        (
            "strategy", "replicas", "at rest", "expected", "in a step", "expected", "sent",
            "expected", "largest device",
        ),
        rows,
        f"{results[0]['parameters']:,} weights with Adam in float32: bytes per weight of all "
        "replicas together, bytes per weight that each process sends in a step, and variables of "
        "the largest device",
    )  # fmt: skip
