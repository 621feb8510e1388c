"""A network that does not fit a device: whole, and cut over processes, each with so much memory.

On a host without GPUs the allocator of GPUs, which knows a limit, stands in for a card's: all that
a process computes on is its (`devices.limit_memory`). Of Python and TensorFlow themselves, which
lie in the host's memory where there is a card, nothing is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from tfdist.bench.memory import network
from tfdist.bench.memory.measure import CONTENDERS
from tfdist.console import tables
from tfdist.launcher.worker_pool import WorkerPool

if TYPE_CHECKING:
    import numpy as np

WHOLE, CUT = "one_device", "sharded parameters, processes"
#: Horovod's buffer, in which it lays tensors together, is among what a process takes: 128 MiB, if
#: nothing is said.
_ENVIRON: Mapping[str, str] = MappingProxyType({"HOROVOD_FUSION_THRESHOLD": str(1 << 20)})
_SECONDS = 900.0
_STEPS = 5


class Answer(NamedTuple):
    """What came of a training.

    Attributes:
        error: Why there was no room; empty: there was.
        loss: Of the last step.
        weights: After it, on rank 0.
    """

    error: str
    loss: float = 0.0
    weights: tuple[np.ndarray, ...] = ()

    def difference(self, other: Answer) -> float:
        """Returns the largest difference in a weight."""
        pairs = zip(self.weights, other.weights, strict=True)
        return max(float(abs(one - another).max()) for one, another in pairs)


def compared(weights: int, layers: int, processes: int, megabytes: int) -> list[dict[str, Any]]:
    """Trains a network whole, whole within a limit, and cut within it.

    Args:
        weights: Of the network, about.
        layers: Of the network.
        processes: Over which it is cut.
        megabytes: That each process may take, of 2^20 bytes.

    Returns:
        Of each: `contender`, `processes`, `limit` in MB or None, `error`, which is empty where it
        trained; and then `loss`, of the last step, and `difference`, the largest in a weight to
        what was trained without a limit.

    Raises:
        LaunchError: A training failed of something else.
    """
    asked = [(WHOLE, 1, None), (WHOLE, 1, megabytes), (CUT, processes, megabytes)]
    told = [_trained(weights, layers, *one) for one in asked]
    results = []
    for (contender, num, limit), answer in zip(asked, told, strict=True):
        result = {"contender": contender, "processes": num, "limit": limit, "error": answer.error}
        if not answer.error:
            result |= {"loss": answer.loss, "difference": answer.difference(told[0])}
        results.append(result)
    return results


def show(results: Sequence[dict[str, Any]]) -> None:
    """Prints what came of each training."""
    tables.numbers(
        ("strategy", "processes", "each may take", "loss", "difference in a weight"),
        [_row(result) for result in results],
        title="Trained where a process may take so much, beside the whole network without a limit",
    )
    for result in results:
        if result["error"]:
            tables.text(f"{result['contender']} in {result['limit']} MB: {result['error']}")


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    limit = "all" if result["limit"] is None else f"{result['limit']} MB"
    begin = (result["contender"], str(result["processes"]), limit)
    if result["error"]:
        return (*begin, "no room", "")
    return (*begin, f"{result['loss']:.6f}", f"{result['difference']:.1e}")


def _trained(
    weights: int, layers: int, contender: str, num_processes: int, megabytes: int | None
) -> Answer:
    """Trains in processes of their own, of which rank 0 tells."""
    with WorkerPool(
        _prepare, contender, megabytes,
        num_workers=num_processes, via="processes" if num_processes > 1 else "",
        environ=_ENVIRON, answer_seconds=_SECONDS,
    ) as pool:  # fmt: skip
        return Answer(*pool.ask(weights, layers)[0])


def _prepare(contender: str, megabytes: int | None) -> Callable[[int, int], tuple[Any, ...]]:
    """In a process: returns what trains there, within the limit."""
    from tfdist import devices, strategies
    from tfdist.errors import OutOfMemoryError
    from tfdist.trainer import Trainer

    if megabytes is not None:
        devices.limit_memory(megabytes)
    chosen = CONTENDERS[contender]
    strategy = strategies.create(chosen.strategy, 1, **chosen.options)

    def told(weights: int, layers: int) -> tuple[Any, ...]:
        width = network.width(weights, layers)
        try:
            trainer = Trainer(functools.partial(network.network, width, layers), strategy)
            data = network.batches(width)
            history = trainer.fit(data, steps_per_epoch=1, epochs=_STEPS, verbose=0)
        except OutOfMemoryError as error:
            return (str(error),)
        found = trainer.model.get_weights()  # of which all processes have a part
        return "", history.history["loss"][-1], tuple(found if strategy.is_chief else ())

    return told
