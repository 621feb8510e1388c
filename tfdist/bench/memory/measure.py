"""What processes hold that train one network, by TensorFlow's own allocator, and what they send.

Each contender trains in a process of its own, or in several. On CPUs the allocator of GPUs takes
the place of malloc, which counts nothing; logical CPU devices share it, so that it tells of all of
them together, and variables tell of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tfdist.bench.memory import network
from tfdist.launcher.worker_pool import WorkerPool

_SHARDED = ("optimizer", "gradients", "parameters")
_DIVIDED = ("tensor_parallel", "pipeline")


class Contender(NamedTuple):
    """Who trains.

    Attributes:
        strategy: Its name.
        options: Its own.
        in_processes: Whether its replicas are in a process each.
    """

    strategy: str
    options: Mapping[str, Any]
    in_processes: bool = False

    @property
    def shard(self) -> str:
        """What is divided; empty: nothing."""
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
_COUNTED: Mapping[str, str] = MappingProxyType({"TF_CPU_ALLOCATOR_USE_BFC": "1"})
_SECONDS = 900.0
_STEPS = 3


def held(contender: str, weights: int, layers: int, devices: int) -> dict[str, Any]:
    """Returns what a contender holds, and what each of its processes sends in a step, in bytes.

    Args:
        contender: Out of `CONTENDERS`.
        weights: Of the network, about.
        layers: Of the network.
        devices: Replicas; one device has one.

    Raises:
        LaunchError: The training failed.
    """
    in_processes = CONTENDERS[contender].in_processes
    num = 1 if contender == "one_device" else devices
    with WorkerPool(
        _prepare,
        contender,
        1 if in_processes else num,
        num_workers=num if in_processes else 1,
        via="processes" if in_processes else "",
        environ=_COUNTED,
        answer_seconds=_SECONDS,
    ) as pool:
        told = pool.ask(weights, layers)
    parameters = told[0]["parameters"]
    return {
        "contender": contender,
        "devices": num,
        "parameters": parameters,
        "rest": sum(one["rest"] for one in told),
        "step": sum(one["step"] for one in told),
        "step_of_process": [one["step"] for one in told],
        "sent": max(one["sent"] for one in told),
        "largest": max(max(one["by_device"].values()) for one in told),
    } | expected(contender, parameters, num)


def expected(contender: str, parameters: int, devices: int) -> dict[str, int]:
    """Returns the bytes that Adam's float32 comes to: 4 a weight, 8 of moments, 4 of gradients.

    As ZeRO counts them (Rajbhandari et al. 2020, sections 3 and 7): its weights that the optimizer
    changes are 4 more where each device reads a copy of its own. It sends (n - 1) / n of all
    weights or gradients twice, as an all-reduce does, where sums are scattered and weights joined
    once; a third time where sums are whole on all (1), or weights are joined again for the way
    back (3), all but the first and the last layer's. Of these, and of gradients that have not
    left, a replica has those of a layer or two at a time: they are left out.

    Args:
        contender: Out of `CONTENDERS`.
        parameters: Of the network.
        devices: Replicas.

    Returns:
        Of all devices together: `expected_rest`, and with the gradients of a replica, or their
        parts, `expected_step`. Of each process: `expected_sent` in a step, at most.
    """
    chosen = CONTENDERS[contender]
    copies = 12 * devices
    if chosen.strategy in _DIVIDED:  # each number, and its gradient, is on one device alone
        copies, devices = 12, 1
    if chosen.shard:
        copies = 12 if chosen.shard == "parameters" else 4 * devices + 12
    in_parts = chosen.shard in ("gradients", "parameters")
    gradients = 4 if in_parts else 4 * devices
    times = 3 if chosen.shard in ("optimizer", "parameters") else 2
    sent = times * 4 * (devices - 1) / devices if chosen.in_processes else 0
    return {
        "expected_rest": copies * parameters,
        "expected_step": (copies + gradients) * parameters,
        "expected_sent": round(sent * parameters),
    }


def _prepare(contender: str, devices: int) -> Callable[[int, int], dict[str, Any]]:
    """In a process: returns what trains, and says what was held there."""
    import tensorflow as tf

    from tfdist import strategies
    from tfdist.strategies.collectives import traffic
    from tfdist.strategies.sharded.held import by_device
    from tfdist.trainer import Trainer

    chosen = CONTENDERS[contender]
    strategy = strategies.create(chosen.strategy, devices, **chosen.options)

    def told(weights: int, layers: int) -> dict[str, Any]:
        width = network.width(weights, layers)
        trainer = Trainer(functools.partial(network.network, width, layers), strategy)
        data = network.batches(width)
        with traffic.counted(strategy.num_workers) as sent:
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
            "by_device": by_device(variables),
        }

    return told
