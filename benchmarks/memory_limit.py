"""A network that does not fit a device: whole, and sharded over processes with a memory limit.

On a host without GPUs, TensorFlow's allocator for GPUs with a limit stands in for a card: it holds
all tensors of a process (`devices.limit_memory`). The memory of Python and TensorFlow themselves is
not counted; with a card it is in the host's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import memory
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.console import tables
from tfdist.tools.bench import harness

if TYPE_CHECKING:
    import numpy as np

WHOLE, SHARDED = "one_device", "sharded parameters, processes"
#: Horovod's fusion buffer counts too; its default size is 128 MiB.
_ENVIRON: Mapping[str, str] = MappingProxyType({"HOROVOD_FUSION_THRESHOLD": str(1 << 20)})
_TIMEOUT_SECONDS = 900.0
_STEPS = 5


class Answer(NamedTuple):
    """The result of a training.

    Attributes:
        error: Why there was not enough memory; empty if there was.
        loss: Loss of the last step.
        weights: Weights after it, on rank 0.
    """

    error: str
    loss: float = 0.0
    weights: tuple[np.ndarray, ...] = ()

    def difference(self, other: Answer) -> float:
        """Returns the largest difference in a weight."""
        pairs = zip(self.weights, other.weights, strict=True)
        return max(float(abs(one - another).max()) for one, another in pairs)


def compare(weights: int, layers: int, processes: int, megabytes: int) -> list[dict[str, Any]]:
    """Trains a network whole without a limit, whole with a limit, and sharded with a limit.

    Args:
        weights: Approximate number of weights.
        layers: Number of layers.
        processes: Number of processes that share the weights.
        megabytes: Memory limit of each process in MiB.

    Returns:
        For each training `contender`, `processes`, `limit` in MiB or None, and `error`, empty if it
        ran; then also `loss` of the last step and `difference`, the largest one in a weight to the
        training without a limit.

    Raises:
        LaunchError: A training failed for another reason.
    """
    cases = [(WHOLE, 1, None), (WHOLE, 1, megabytes), (SHARDED, processes, megabytes)]
    answers = [_train(weights, layers, *case) for case in cases]
    results = []
    for (contender, number, limit), answer in zip(cases, answers, strict=True):
        result = {
            "contender": contender, "processes": number, "limit": limit, "error": answer.error
        }  # fmt: skip
        if not answer.error:
            result |= {"loss": answer.loss, "difference": answer.difference(answers[0])}
        results.append(result)
    return results


def show(results: Sequence[dict[str, Any]], output: harness.Output) -> None:
    """Prints the result of each training."""
    output.show(
        ("strategy", "processes", "memory limit", "loss", "difference in a weight"),
        [_cells(result) for result in results],
        "training with a memory limit for each process, beside one without a limit",
    )
    for result in results:
        if result["error"]:
            tables.text(f"{result['contender']} in {result['limit']} MB: {result['error']}")


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    limit = "none" if result["limit"] is None else f"{result['limit']} MB"
    begin = (result["contender"], str(result["processes"]), limit)
    if result["error"]:
        return (*begin, "out of memory", "")
    return (*begin, f"{result['loss']:.6f}", f"{result['difference']:.1e}")


def _train(
    weights: int, layers: int, contender: str, num_processes: int, megabytes: int | None
) -> Answer:
    """Trains in processes of its own, and returns rank 0's answer."""
    with WorkerPool(
        _prepare, contender, megabytes,
        num_workers=num_processes, via="processes" if num_processes > 1 else "",
        environ=_ENVIRON, timeout_seconds=_TIMEOUT_SECONDS,
    ) as pool:  # fmt: skip
        return Answer(*pool.ask(weights, layers)[0])


def _prepare(contender: str, megabytes: int | None) -> Callable[[int, int], tuple[Any, ...]]:
    """In a process: returns what trains within the limit."""
    from tfdist import devices, strategies
    from tfdist.errors import OutOfMemoryError
    from tfdist.trainer import Trainer

    if megabytes is not None:
        devices.limit_memory(megabytes)
    chosen = memory.CONTENDERS[contender]
    strategy = strategies.create(chosen.strategy, 1, **chosen.options)

    def answer(weights: int, layers: int) -> tuple[Any, ...]:
        width = memory.width(weights, layers)
        try:
            trainer = Trainer(functools.partial(memory.network, width, layers), strategy)
            data = memory.batches(width)
            history = trainer.fit(data, steps_per_epoch=1, epochs=_STEPS, verbose=0)
        except OutOfMemoryError as error:
            return (str(error),)
        found = trainer.model.get_weights()  # gathers, so every process calls it
        return "", history.history["loss"][-1], tuple(found if strategy.group.is_chief else ())

    return answer
