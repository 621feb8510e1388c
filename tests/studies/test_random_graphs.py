"""What the row analysis says about random graphs agrees with their values."""

from __future__ import annotations

import pytest

from tests.studies.random_graphs import errors_of


@pytest.mark.parametrize(
    "numbers", [range(20), pytest.param(range(20, 500), marks=pytest.mark.long)]
)
def test_classes_agree_with_values(numbers: range) -> None:
    results = {number: errors_of(0, number) for number in numbers}
    assert not {number: errors for number, errors in results.items() if errors}
