"""The contract: every strategy trains every case to what plain Keras gives on one device."""

from __future__ import annotations

import pytest

from tests.conformance import engines
from tests.conformance.cases import CASES


@pytest.mark.parametrize(("strategy", "num_replicas"), engines.STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, strategy: str, num_replicas: int) -> None:
    """Weights, history, evaluation and counts are those of the reference."""
    result = engines.tfdist(name, strategy, num_replicas)
    differences = engines.compare(result, engines.reference(name), CASES[name])
    assert not differences, "\n".join(map(str, differences))
