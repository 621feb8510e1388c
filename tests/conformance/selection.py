"""Which cases run under which strategies, by register: quick, test, check and long.

`make conformance` runs every case under every strategy and number of replicas or processes.
`make check` runs every case under the strategies of `WHOLE` with their first number. Their further
numbers run the same code on other shares, and the other strategies run the same step with weights
and sums in other places: there it runs the cases of `FURTHER`, whose code depends on the number of
replicas and on how they exchange, and those of `FEW`.

`make test` runs a part of that, `GATE`: under mirrored a case for each feature, and under every
other strategy the few that break when the strategy is broken. `make quick` runs `QUICK`. A case
costs about 1.2 CPU seconds under a strategy, its reference 1.8, and a group of processes 10.
"""

from __future__ import annotations

import pytest

#: Strategies under which `make check` runs every case: one for each way to run the step.
WHOLE = ("one_device", "mirrored", "multi_worker", "horovod", "parameter_server")

#: The cases that depend on the number of replicas or processes.
FURTHER = {
    "How rows are split over replicas, some of which may have none": (
        "uneven-batches",
        "small-batches",
    ),
    "How data are given to several workers, and where their end is found": (
        "unknown-length",
        "generator",
    ),
    "How much a replica's mean, sum or penalty counts": (
        "add-loss-sum",
        "add-loss-of-weights",
        "masked-mean-with-sample-weight",
    ),
    "What is summed over replicas: dense and sparse gradients, states of metrics": (
        "embedding-clipped",
        "auc",
    ),
    "What is exchanged in the forward pass, and batches gathered from all replicas": (
        "batch-norm",
        "circle",
        "metric-function-of-batch",
    ),
    "What all replicas have to decide alike": ("loss-scale-overflow",),
    "Rounds of accumulation, each of which is split again": ("accumulate-clipped",),
}

#: All of that at once, in the largest of the cases.
ALL = "all-together"

#: Strategies whose first number of replicas is left out for a further one.
THREE = ("central_storage", "towers")

#: Strategies that split a model run few cases in `make check`: their own tests show how they split
#: it, and these cases how sums are exchanged, in the step and inside its forward pass.
FEW: dict[str, tuple[str, ...]] = {
    "mirrored hierarchical_copy": ("gradient-accumulation", "embedding-clipped"),
    "mirrored NCCL stand-in": ("gradient-accumulation", "uneven-batches", "auc"),
    "mirrored traced once": ("uneven-batches", "embedding-clipped"),
    "horovod in buckets": ("embedding-clipped", "rows-that-mix"),
    "multi_worker in buckets": ("batch-norm",),
    "pipeline": ("embedding-clipped", "batch-norm", "accumulate-clipped"),
    "tensor_parallel": ("accumulate-clipped",),
    "pipeline over processes": ("batch-norm",),
    "tensor_parallel over processes": (),
    "sharded optimizer": (),
    "sharded gradients": ("uneven-batches",),
    "sharded parameters": ("embedding-clipped",),
    "sharded optimizer over processes": (),
    "sharded gradients over processes": (),
    "sharded parameters over processes": (
        "accumulate-clipped",  # two loops that gather the same weights
        "embedding-clipped",
        "rows-that-mix",
    ),
    "pipeline over TensorFlow": ("batch-norm",),
    "tensor_parallel over TensorFlow": ("accumulate-clipped",),
    "sharded optimizer over TensorFlow": (),
    "sharded gradients over TensorFlow": ("accumulate-clipped",),
}

#: The cases that `make quick` runs, under mirrored with two replicas.
QUICK = (
    "uneven-batches",
    "unknown-length",
    "loss-function-mean",
    "masked-mean-with-sample-weight",
    "embedding-clipped",
    "auc",
    "batch-norm",
    "global-clipnorm",
    "loss-scale-overflow",
    "accumulate-clipped",
)

#: The cases that `make test` runs, by strategy, with its first number of replicas or processes.
GATE: dict[str, tuple[str, ...]] = {
    "mirrored": (
        *QUICK,
        *("add-loss-sum", "add-loss-of-weights", "several-losses-dict", "compute-loss-extended"),
        *("metric-function-of-batch", "metric-that-counts-batches", "add-loss-of-batch"),
        *("layer-state-of-batch", "accumulate-circle", "small-batches", "dict-of-inputs"),
        *("subclassed-unbuilt", "generator", "steps-per-epoch", "validation-split"),
        *("early-stopping", "positions-accumulate", "no-gradient", "tied-weights", "loss-sum"),
        *("loss-not-reduced", "dice", "circle", "f1-score", "metric-in-call"),
        *("batch-norm-masked", "moving-average", "gradient-accumulation-clipped", "constraints"),
        *("steps-per-execution", "jit-compile", "run-eagerly", "loss-scale-clipped"),
        *("all-together", "multioptimizer", "own-step", "rows-that-mix", "class-weight"),
        *("ignore-class", "weights-of-zero", "dropout", "dropout-accumulate"),
    ),
    "one_device": ("uneven-batches", "circle", "accumulate-clipped", "loss-scale-overflow", ALL),
    "mirrored traced once": ("uneven-batches", "embedding-clipped"),
    "mirrored hierarchical_copy": ("embedding-clipped",),
    "mirrored NCCL stand-in": ("uneven-batches",),
    "central_storage": ("uneven-batches", "embedding-clipped", "batch-norm"),
    "towers": ("uneven-batches", "embedding-clipped", "batch-norm", "circle"),
    "horovod": (
        *("uneven-batches", "unknown-length", "add-loss-sum", "embedding-clipped", "auc"),
        *("batch-norm", "circle", "loss-scale-overflow", "accumulate-clipped", "dropout", ALL),
    ),
    "multi_worker": (
        *("uneven-batches", "unknown-length", "embedding-clipped", "auc", "batch-norm"),
        *("circle", "accumulate-clipped"),
    ),
    "parameter_server": ("uneven-batches", "embedding-clipped", "batch-norm", "auc"),
    "pipeline": ("embedding-clipped", "batch-norm"),
    "tensor_parallel": ("accumulate-clipped",),
    "sharded gradients": ("uneven-batches",),
    "sharded parameters": ("embedding-clipped",),
    "sharded parameters over processes": ("accumulate-clipped",),
}
#: The cases that `make test` runs with the second number.
GATE_FURTHER: dict[str, tuple[str, ...]] = {"mirrored": ("uneven-batches", "batch-norm")}

_FURTHER = {name for names in FURTHER.values() for name in names}


def marks(name: str, strategy: str, number: int) -> list[pytest.MarkDecorator]:
    """Returns the mark of a test of the contract: none for `make test`.

    Args:
        name: The case.
        strategy: The strategy, as tests name it.
        number: Index of the number of replicas or processes among those of the strategy.
    """
    if not _in_check(name, strategy, number):
        return [pytest.mark.long]
    if strategy == "mirrored" and number == 0 and name in QUICK:
        return [pytest.mark.quick]
    return [] if _in_gate(name, strategy, number) else [pytest.mark.check]


def _in_check(name: str, strategy: str, number: int) -> bool:
    if strategy in FEW:
        return number == 0 and name in FEW[strategy]
    if strategy in WHOLE:
        return number == 0 or name in _FURTHER
    return name in _FURTHER | {ALL} and (number > 0 or strategy not in THREE)


def _in_gate(name: str, strategy: str, number: int) -> bool:
    first = 1 if strategy in THREE else 0
    if number == first:
        return name in GATE.get(strategy, ())
    return number == 1 and name in GATE_FURTHER.get(strategy, ())
