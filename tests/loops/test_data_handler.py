"""Limits from `keras.config`, and data that end early."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest

from tests.loops.test_epoch import Listener, run
from tfdist.loops.data_handler import limited_epochs, limited_steps_per_epoch
from tfdist.strategies.base import Strategy


@pytest.fixture
def limited() -> Iterator[None]:
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(1)
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@pytest.mark.filterwarnings("ignore:Limiting")
@pytest.mark.usefixtures("limited")
def test_as_many_as_the_configuration_allows() -> None:
    assert (limited_epochs(1), limited_epochs(5)) == (1, 2)
    assert (
        limited_steps_per_epoch(None),
        limited_steps_per_epoch(7),
    ) == (1, 1)
    assert run(Strategy()) == [1]


def test_without_a_limit_nothing_changes() -> None:
    assert (limited_epochs(0), limited_epochs(5)) == (0, 5)
    assert (
        limited_steps_per_epoch(None),
        limited_steps_per_epoch(7),
    ) == (None, 7)


def test_no_call_after_the_end_of_the_data() -> None:
    heard: list[str] = []
    with pytest.warns(UserWarning, match="ended after 3 of 7 steps"):
        run(Strategy(), Listener("callback", heard), steps_per_epoch=7)
    assert heard[-2:] == ["callback from 2", "callback to 2"]
