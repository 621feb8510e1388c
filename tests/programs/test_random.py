"""Models drawn at random train to the numbers of one device; a thousand by the command."""

from __future__ import annotations

import pytest

from tests.programs.random import drawn, wrong


@pytest.mark.parametrize("number", range(40))
def test_equals_one_device(number: int) -> None:
    recipe = drawn(0, number)
    assert not wrong(recipe), recipe
