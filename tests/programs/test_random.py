"""Random models match one device. `python -m tests.programs.random` tries a thousand."""

from __future__ import annotations

import pytest

from tests.programs.random import differences_of, draw_recipe


@pytest.mark.parametrize("number", range(40))
def test_equals_one_device(number: int) -> None:
    recipe = draw_recipe(0, number)
    assert not differences_of(recipe), recipe
