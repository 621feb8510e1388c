"""The contract: every strategy trains every case to the results of plain Keras on one device."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

import tfdist
from tests.conformance import engines, results, selection
from tests.conformance.cases import CASES
from tfdist.errors import TfdistError

CHECK = pytest.mark.check

# Ordered by strategy, so that two pytest-xdist processes do not compute the same references.
PARAMETERS = [
    pytest.param(
        name, strategy, num_replicas,
        marks=selection.marks(name, strategy, number), id=f"{name}-{strategy}-{num_replicas}",
    )
    for strategy, numbers in engines.STRATEGIES.items()
    for number, num_replicas in enumerate(numbers)
    for name in CASES
]  # fmt: skip


@pytest.mark.parametrize(("name", "strategy", "num_replicas"), PARAMETERS)
def test_equals_one_device(
    name: str, strategy: str, num_replicas: int, expected: Callable[[str], results.Result]
) -> None:
    """Weights, history, evaluation and step counts match the reference."""
    case = CASES[name]
    try:
        result = engines.tfdist(case, strategy, num_replicas)
    except TfdistError:
        if not engines.may_refuse(case, strategy, num_replicas):
            raise
        return
    differences = results.compare(result, expected(name), case)
    assert not differences, "\n".join(map(str, differences))


@pytest.mark.parametrize(
    "strategy", ["mirrored", pytest.param("central_storage", marks=CHECK), "towers"]
)
@pytest.mark.parametrize(
    "name",
    [
        "small-batches",
        "masked-steps",
        pytest.param("several-losses-dict", marks=CHECK),
        pytest.param("convolution", marks=CHECK),
    ],
)
def test_predicts_as_one_device(name: str, strategy: str) -> None:
    """`predict` returns outputs for exactly the given rows, in order; no batch divides evenly."""
    case = CASES[name]
    expected = case.build().predict(case.data.x, verbose=0)
    trainer = tfdist.Trainer(case.build, strategy=strategy, devices=3)
    predicted = trainer.predict(case.data.x, batch_size=case.batch_size, verbose=0)
    keras.tree.assert_same_structure(predicted, expected)
    for found, wanted in zip(
        keras.tree.flatten(predicted), keras.tree.flatten(expected), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=results.TOLERANCE, atol=results.TOLERANCE)
