"""Which cases are asked of which strategies and numbers: the rule of `make test`.

The strategies of `WHOLE` train every case under their first number of replicas or processes. Their
further numbers, from three replicas to two processes of two, run the same code on other shares, and
the other strategies the same step with weights and sums in other places: most cases cannot come out
otherwise there. `make test` asks of these the cases of the table below, whose code depends on how
many replicas and processes there are and on how they exchange: of strategies outside of `WHOLE`
with three replicas, which show what two do. `make conformance` asks all of all.
"""

from __future__ import annotations

import pytest

#: Those that train every case in `make test` too: one for each way to run the step.
WHOLE = ("one_device", "mirrored", "multi_worker", "horovod", "parameter_server")

#: What depends on the number of replicas or processes: the cases that show it.
FURTHER = {
    "How the rows of a batch are cut, and how many shares are left without a row": (
        "uneven-batches",
        "small-batches",
    ),
    "How data are handed to several workers, and where their end is found": (
        "unknown-length",
        "generator",
    ),
    "What a share's mean, sum or penalty counts for, as one of so many": (
        "add-loss-sum",
        "add-loss-of-weights",
        "masked-mean-with-sample-weight",
    ),
    "What is summed over replicas: dense and sparse gradients, states of metrics": (
        "embedding-clipped",
        "auc",
    ),
    "What is exchanged in the forward pass, and whole batches laid together from their shares": (
        "batch-norm",
        "circle",
        "metric-function-of-batch",
    ),
    "What all replicas have to decide alike": ("loss-scale-overflow",),
    "Rounds of accumulation, each of them cut again": ("accumulate-clipped",),
}

#: All of that at once, in the largest of the cases: under each strategy, for one number.
ALL = "all-together"

#: Strategies whose first number is left out for a further one.
THREE = ("central_storage", "towers")

#: Strategies that compute a model in parts are asked few in `make test`: their own tests show the
#: parts, and these how sums cross, in the step and inside of its forward pass. Networks as small as
#: those of the cases are traced for each replica; here they are not.
FEW: dict[str, tuple[str, ...]] = {
    "mirrored traced once": ("uneven-batches", "embedding-clipped"),
    "horovod in buckets": ("embedding-clipped", "rows-that-mix"),
    "multi_worker in buckets": ("batch-norm",),
    "pipeline": ("embedding-clipped", "batch-norm", "accumulate-clipped"),
    "channel_split": ("accumulate-clipped",),
    "pipeline over processes": ("batch-norm",),
    "channel_split over processes": (),
    "sharded optimizer": (),
    "sharded gradients": ("uneven-batches",),
    "sharded parameters": ("embedding-clipped",),
    "sharded optimizer over processes": (),
    "sharded gradients over processes": (),
    "sharded parameters over processes": (
        "accumulate-clipped",  # two loops that join the same weights
        "embedding-clipped",
        "rows-that-mix",
    ),
}

_ASKED = {name for names in FURTHER.values() for name in names}


def marks(name: str, strategy: str, number: int) -> list[pytest.MarkDecorator]:
    """Marks what only `make conformance` asks.

    Args:
        name: of a case.
        strategy: of the library, by name.
        number: the place of a number of replicas or processes among those of the strategy, from 0.
    """
    if strategy in FEW:
        asked = number == 0 and name in FEW[strategy]
    elif strategy in WHOLE:
        asked = number == 0 or name in _ASKED
    else:
        asked = name in _ASKED | {ALL} and (number > 0 or strategy not in THREE)
    return [] if asked else [pytest.mark.long]
