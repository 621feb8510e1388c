"""Which cases run under which strategies, by register: quick, test, check and long.

`make conformance` runs every case under every strategy and number of replicas or processes. `make
check` runs every case under `mirrored` with two replicas. The other strategies run the same step
with weights and reductions in other places: `make check` runs only the cases of `FURTHER`, whose
code depends on the number of replicas and on their communication, under some of them also cases of
`FEEDING`, and only those of `FEW` under strategies that split a model. Other numbers of replicas
run the same code on per-replica batches of another size, so that the cases of `RESIZED` suffice.

`make test` runs the subset `GATE`: under `mirrored`, a case for each feature that neither
`all-together` nor a cheaper test covers, and under every other strategy the few cases that fail
when that strategy is broken. `make quick` runs `QUICK`. A case takes about 1.2 CPU seconds under a
strategy in one process and 4 over two processes, its reference 1.8, and starting a group of
processes 10.
"""

from __future__ import annotations

import pytest

#: Cases that depend on the number of replicas or processes, by the reason.
FURTHER = {
    "Splitting a batch over replicas, some of which may get no rows": (
        "uneven-batches",
        "small-batches",
    ),
    "Distributing data over workers, and detecting the end of the data": (
        "unknown-length",
        "generator",
    ),
    "Weighting each replica's mean, sum or penalty": (
        "add-loss-sum",
        "add-loss-of-weights",
        "masked-mean-with-sample-weight",
    ),
    "All-reduce of dense and sparse gradients and of metric states": ("embedding-clipped", "auc"),
    "Communication in the forward pass, and full-batch mode": (
        "batch-norm",
        "circle",
        "metric-function-of-batch",
    ),
    "Decisions that all replicas must agree on": ("loss-scale-overflow",),
    "Accumulation rounds, each split over the replicas": ("accumulate-clipped",),
}

#: Cases of the number of replicas alone.
RESIZED = ("uneven-batches", "small-batches", "masked-mean-with-sample-weight", "batch-norm")

#: Further cases of strategies with several workers or a custom loop, by the reason. Horovod
#: and TensorFlow's collectives differ in how they communicate (`FURTHER`), but split data, agree on
#: states and draw random numbers in the same way.
FEEDING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Feeding workers from every kind of data": (
        ("horovod", "parameter_server"),
        (
            *("dataset", "pydataset", "strings", "dict-of-inputs", "steps-per-epoch"),
            *("validation-split", "initial-epoch", "early-stopping"),
        ),
    ),
    "States that stay equal on all workers": (
        ("horovod", "parameter_server"),
        (
            *("layer-state", "layer-state-of-batch", "metric-in-call", "custom-metric"),
            *("moving-average-overwrites", "loss-scale-overflow-state", "constraints"),
        ),
    ),
    "Random numbers of the rows of one worker": (
        ("horovod", "parameter_server"),
        ("dropout", "augmentation", "own-step-with-noise"),
    ),
    "Steps that the strategy does not call one by one": (
        ("one_device", "multi_worker", "parameter_server"),
        (
            *("own-step", "steps-per-execution", "jit-compile", "run-eagerly"),
            *("compute-loss-extended", "subclassed-unbuilt", "multioptimizer", "rows-that-mix"),
        ),
    ),
}

#: One large case that combines all of the above.
ALL = "all-together"

#: Strategies that skip their first number of replicas in favor of a larger one.
THREE = ("central_storage", "towers")

#: Strategies that split a model run few cases in `make check`. Their unit tests cover how they
#: split it; these cases cover their communication, in the step and inside the forward pass.
FEW: dict[str, tuple[str, ...]] = {
    "mirrored hierarchical_copy": ("gradient-accumulation", "embedding-clipped"),
    "mirrored NCCL stand-in": ("gradient-accumulation", "uneven-batches", "auc"),
    "mirrored traced once": ("uneven-batches", "embedding-clipped"),
    "horovod in buckets": ("embedding-clipped", "rows-that-mix"),
    "multi_worker in buckets": ("batch-norm",),
    "pipeline": ("embedding-clipped", "batch-norm", "rows-that-mix"),
    "pipeline interleaved": ("lstm", "masked-sum", "positions-accumulate", "all-together"),
    "pipeline zb": ("lstm", "embedding-clipped", "batch-norm", "masked-sum", "accumulate-clipped"),
    "tensor_parallel": ("accumulate-clipped",),
    "tensor_parallel split activations": ("attention", "dropout", "batch-norm"),
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
    # tests/cluster/remote runs three of these cases with one pair of servers.
    "pipeline on servers": (),
    "tensor_parallel on servers": (),
    "sharded optimizer on servers": (),
    "sharded gradients on servers": (),
    "sharded parameters on servers": (),
    "pipeline on servers over processes": ("batch-norm",),
    "sharded parameters on a mesh": ("embedding-clipped", "rows-that-mix"),
    "sharded gradients on a mesh over TensorFlow": ("uneven-batches",),
    "pipeline on a mesh": ("accumulate-clipped",),
    "tensor_parallel on a mesh over TensorFlow": ("batch-norm",),
    "tensor_parallel split activations on a mesh over TensorFlow": ("dropout",),
    "pipeline over TensorFlow": ("batch-norm",),
    "tensor_parallel over TensorFlow": ("accumulate-clipped",),
    "sharded optimizer over TensorFlow": (),
    "sharded gradients over TensorFlow": ("accumulate-clipped",),
    "sharded parameters over TensorFlow": (
        "accumulate-clipped",
        "batch-norm",  # the backward pass sums over replicas between gathers
    ),
}

#: Cases that `make quick` runs, under `mirrored` with two replicas.
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

#: Cases that `make test` runs, by strategy, with its first number of replicas or processes.
GATE: dict[str, tuple[str, ...]] = {
    "mirrored": (
        *QUICK,
        *("add-loss-sum", "add-loss-of-weights", "compute-loss-extended", "add-loss-of-batch"),
        *("metric-function-of-batch", "metric-in-call", "layer-state-of-batch", "loss-not-reduced"),
        *("circle", "accumulate-circle", "rows-that-mix", "batch-norm-masked", "ignore-class"),
        *("steps-per-execution", "jit-compile", "dropout", ALL),
    ),
    "one_device": ("uneven-batches", "circle", "accumulate-clipped", "loss-scale-overflow"),
    "mirrored traced once": ("uneven-batches", "embedding-clipped"),
    "mirrored hierarchical_copy": ("embedding-clipped",),
    "mirrored NCCL stand-in": ("uneven-batches",),
    "central_storage": ("uneven-batches", "embedding-clipped", "batch-norm"),
    "towers": ("uneven-batches", "embedding-clipped", "batch-norm", "circle"),
    "horovod": (
        *("uneven-batches", "unknown-length", "embedding-clipped", "batch-norm", "circle"),
        *("loss-scale-overflow", "accumulate-clipped", "dropout"),
    ),
    "multi_worker": (
        *("uneven-batches", "unknown-length", "embedding-clipped", "batch-norm", "circle"),
    ),
    "pipeline": ("embedding-clipped", "batch-norm"),
    "tensor_parallel": ("accumulate-clipped",),
    "tensor_parallel split activations": ("attention", "dropout", "batch-norm"),
    "sharded gradients": ("uneven-batches",),
    "sharded parameters": ("embedding-clipped",),
    "sharded parameters over processes": ("accumulate-clipped",),
}
#: Cases that `make test` also runs with the second number.
GATE_FURTHER: dict[str, tuple[str, ...]] = {"mirrored": ("uneven-batches",)}

_FURTHER = {ALL, *(name for names in FURTHER.values() for name in names)}


def marks(name: str, strategy: str, number: int) -> list[pytest.MarkDecorator]:
    """Returns the marks of a conformance test; none for `make test`."""
    if not _in_check(name, strategy, number):
        return [pytest.mark.long]
    if strategy == "mirrored" and number == 0 and name in QUICK:
        return [pytest.mark.quick]
    return [] if _in_gate(name, strategy, number) else [pytest.mark.check]


def _in_check(name: str, strategy: str, number: int) -> bool:
    if strategy in FEW:
        return number == 0 and name in FEW[strategy]
    if number != (1 if strategy in THREE else 0):
        return strategy not in THREE and name in RESIZED
    if strategy == "mirrored":
        return True
    if any(strategy in strategies and name in names for strategies, names in FEEDING.values()):
        return True
    # With one replica there is nothing to split or to communicate.
    return name in (GATE[strategy] if strategy == "one_device" else _FURTHER)


def _in_gate(name: str, strategy: str, number: int) -> bool:
    first = 1 if strategy in THREE else 0
    if number == first:
        return name in GATE.get(strategy, ())
    return number == 1 and name in GATE_FURTHER.get(strategy, ())
