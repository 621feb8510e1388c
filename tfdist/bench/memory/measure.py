"""What a process holds that trains one network, by TensorFlow's own allocator.

Each contender trains in a process of its own. On CPUs the allocator of GPUs takes the place of
malloc, which counts nothing; logical CPU devices share it, so that it tells of all of them
together, and variables tell of each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tfdist.launcher.worker_pool import WorkerPool

#: Contenders: the strategy and its options.
CONTENDERS: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "one_device": ("one_device", {}),
        "mirrored": ("mirrored", {}),
        **{
            f"sharded {what}": ("sharded", {"shard": what})
            for what in ("optimizer", "gradients", "parameters")
        },
    }
)
_COUNTED: Mapping[str, str] = MappingProxyType({"TF_CPU_ALLOCATOR_USE_BFC": "1"})
_SECONDS = 900.0
_ROWS, _STEPS = 8, 3
_MULTIPLE = 64


def held(contender: str, weights: int, layers: int, devices: int) -> dict[str, Any]:
    """Returns what a contender holds, in bytes.

    Args:
        contender: Out of `CONTENDERS`.
        weights: Of the network, about.
        layers: Of the network.
        devices: Replicas; one device has one.

    Raises:
        LaunchError: The training failed.
    """
    with WorkerPool(
        _prepare, num_workers=1, via="", environ=_COUNTED, answer_seconds=_SECONDS
    ) as pool:
        num = 1 if contender == "one_device" else devices
        (told,) = pool.ask(contender, weights, layers, num)
    return {"contender": contender, "devices": num, **told} | expected(
        contender, told["parameters"], num
    )


def expected(contender: str, parameters: int, devices: int) -> dict[str, int]:
    """Returns the bytes that Adam's float32 comes to: 4 a weight, 8 of moments, 4 of gradients.

    As ZeRO counts them (Rajbhandari et al. 2020, section 3): its weights that the optimizer changes
    are 4 more where each device reads a copy of its own.

    Args:
        contender: Out of `CONTENDERS`.
        parameters: Of the network.
        devices: Replicas.

    Returns:
        Of all devices together: `expected_rest`, and with a gradient a replica, and the weights
        that a replica joins for it, `expected_step`.
    """
    copies = 12 * devices
    if contender.startswith("sharded"):
        copies = 12 if contender == "sharded parameters" else 4 * devices + 12
    joined = 4 * devices if contender == "sharded parameters" else 0
    return {
        "expected_rest": copies * parameters,
        "expected_step": (copies + joined + 4 * devices) * parameters,
    }


def _prepare() -> Callable[[str, int, int, int], dict[str, Any]]:
    """In the process: returns what trains, and says what was held."""
    import tensorflow as tf

    from tfdist import strategies
    from tfdist.strategies.sharded.held import by_device
    from tfdist.trainer import Trainer

    def told(contender: str, weights: int, layers: int, devices: int) -> dict[str, Any]:
        name, options = CONTENDERS[contender]
        # Halves of odd sizes lie in chunks of wholes, which the allocator counts and does not cut.
        width = _MULTIPLE * max(1, round(math.sqrt(weights / layers) / _MULTIPLE))
        strategy = strategies.create(name, devices, **options)
        trainer = Trainer(functools.partial(_network, width, layers), strategy)
        x = tf.ones([_ROWS, width])
        data = tf.data.Dataset.from_tensors((x, x)).repeat()
        trainer.fit(data, steps_per_epoch=1, verbose=0)
        tf.config.experimental.reset_memory_stats("CPU:0")
        trainer.fit(data, steps_per_epoch=_STEPS, verbose=0)
        counted = tf.config.experimental.get_memory_info("CPU:0")
        variables = trainer.model.trainable_variables + trainer.model.optimizer.variables
        return {
            "parameters": trainer.model.count_params(),
            "rest": counted["current"],
            "step": counted["peak"],
            "by_device": by_device(variables),
        }

    return told


def _network(width: int, layers: int) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(width, "tanh", use_bias=False) for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *dense])
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return model
