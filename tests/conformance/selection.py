"""Which cases are asked under which numbers: the rule of `make test`.

Every strategy trains every case under its first number of replicas or processes. Its further
numbers, from three replicas to two processes of two, run the same code on other shares: most cases
cannot come out otherwise there. `make test` asks under them the cases of this table, whose code
depends on how many replicas and processes there are; `make conformance` asks all.
"""

from __future__ import annotations

import pytest

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
    "All of it at once": ("all-together",),
}

_ASKED = {name for names in FURTHER.values() for name in names}


def marks(name: str, number: int) -> list[pytest.MarkDecorator]:
    """Marks what only `make conformance` asks.

    Args:
        name: of a case.
        number: the place of a number of replicas or processes among those of its strategy, from 0.
    """
    return [] if number == 0 or name in _ASKED else [pytest.mark.long]
