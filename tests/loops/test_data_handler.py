"""Limits from `keras.config`, data that end early, saved positions, and what `tf.data` tunes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.loops.test_epoch import Listener, run
from tfdist.loops.data_handler import DataHandler, limited_epochs, limited_steps_per_epoch
from tfdist.strategies.one_device import OneDevice
from tfdist.upstream import input_data


@pytest.fixture
def limited() -> Iterator[None]:
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(1)
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@pytest.mark.filterwarnings("ignore:Limiting")
@pytest.mark.usefixtures("limited")
def test_limits_of_keras_config() -> None:
    assert (limited_epochs(1), limited_epochs(5)) == (1, 2)
    assert (limited_steps_per_epoch(None), limited_steps_per_epoch(7)) == (1, 1)
    assert run(OneDevice()) == [1]


def test_default_config_has_no_limits() -> None:
    assert (limited_epochs(0), limited_epochs(5)) == (0, 5)
    assert (limited_steps_per_epoch(None), limited_steps_per_epoch(7)) == (None, 7)


def test_data_that_end_early_make_no_further_calls() -> None:
    events: list[str] = []
    with pytest.warns(UserWarning, match="ended after 3 of 7 steps"):
        run(OneDevice(), Listener("callback", events), steps_per_epoch=7)
    assert events[-2:] == ["callback from 2", "callback to 2"]


@pytest.mark.parametrize("step", [0, 2])
def test_restores_positions_of_earlier_versions(step: int) -> None:
    def handler() -> DataHandler:
        return DataHandler(OneDevice(), np.arange(12.0)[:, None], training=True, batch_size=2)

    first = handler()
    iterator = first.begin_epoch()
    for _ in range(step):
        next(iterator)
    state = first.state(step)
    old_names = {"within pass": "goes on", "unused passes": "in vain"}
    old = {old_names.get(name, name): value for name, value in state.items()}
    assert {"goes on", "in vain"} <= old.keys()

    def rows(saved: dict[str, Any]) -> list[Any]:
        resumed = handler()
        resumed.restore(saved)
        return [np.asarray(batch).tolist() for batch, *_ in resumed.begin_epoch(step)]

    assert rows(old) == rows(state)
    assert len(rows(old)) == 6 - step


_ARRAY = np.arange(12.0)[:, None]
_CHOSEN = tf.data.Options()
_CHOSEN.autotune.ram_budget = 2**20


@pytest.mark.parametrize(
    ("x", "tuned"),
    [
        pytest.param(_ARRAY, False, id="arrays"),
        pytest.param(((batch,) for batch in _ARRAY), False, id="generator"),
        pytest.param(tf.data.Dataset.from_tensors(_ARRAY), False, id="data set"),
        pytest.param(
            tf.data.Dataset.from_tensors(_ARRAY).with_options(_CHOSEN), True, id="chosen budget"
        ),
    ],
)
def test_an_iterator_has_no_thread_that_delays_its_end(x: Any, tuned: bool) -> None:
    dataset = input_data.dataset_of(input_data.data_adapter(x, shuffle=False))
    at_the_end = dataset.map(lambda *batch: batch, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    assert (at_the_end.options().autotune.enabled is not False) == tuned
