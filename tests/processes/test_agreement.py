"""Workers that differ stay in agreement: they share decisions, and differing data raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.conformance.layouts import AnsweringPool, Layout, values_of
from tests.processes import agreement, chief_callbacks, resuming
from tests.support.training import TOLERANCE, X, Y, build

pytestmark = pytest.mark.processes


#: Runs a scenario on two workers when a test asks for it, and returns the result of rank 0.
Outcomes = Callable[[str], Any]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.xdist_group(f"agreement-{name}"))
        for name in ("multi_worker", "horovod")
    ],
)
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    with AnsweringPool(Layout(request.param, 2), agreement.answering, request.param) as pool:
        yield lambda scenario: values_of(pool.ask(scenario))[0]


def test_unseeded_shuffles_are_equal(outcomes: Outcomes) -> None:
    """The first test, because the other scenarios set seeds."""
    rank_0, rank_1 = outcomes("unseeded_shuffles_agree")
    assert len(rank_0) == 3
    np.testing.assert_array_equal(rank_0, rank_1)


def test_stop_on_one_rank_stops_all(outcomes: Outcomes) -> None:
    np.testing.assert_array_equal(outcomes("stops_on_one_rank"), [[1], [1]])
    np.testing.assert_array_equal(outcomes("stops_predicting_on_one_rank"), [[4], [4]])


def test_learning_rate_comes_from_rank_0(outcomes: Outcomes) -> None:
    np.testing.assert_array_equal(outcomes("learning_rate_of_rank_0"), [[0.25], [0.25]])


def test_different_data_on_a_rank_raise(outcomes: Outcomes) -> None:
    errors = outcomes("different_data_raise")
    for check_data in ("full", "sampled", "verified"):
        assert "rank 1 got different batches from rank 0" in errors[check_data]
        assert "InputContext" in errors[check_data]
    assert errors["off"] == "no error"


def test_initial_weights_come_from_rank_0(outcomes: Outcomes) -> None:
    wanted = np.concatenate([w.ravel() for w in build().get_weights() * 2])
    np.testing.assert_array_equal(outcomes("weights_of_rank_0"), [wanted, wanted])


def test_uneven_data_are_used_completely(outcomes: Outcomes) -> None:
    """Equals one device with batches of both ranks' rows, then of rank 0's remaining rows."""
    model = build()
    rows = [np.arange(len(X))[rows_of_batch] for rows_of_batch in agreement.rank_rows(0)]
    for i, rows_of_batch in enumerate(agreement.rank_rows(1)):
        rows[i] = np.concatenate([rows[i], np.arange(len(X))[rows_of_batch]])
    for _ in range(2):
        for batch in rows:
            model.train_on_batch(X[batch], Y[batch])
    for found, wanted in zip(outcomes("uneven_data"), model.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_uneven_data_can_stop_or_raise(outcomes: Outcomes) -> None:
    """Ranks have three and two batches of unknown length, and four and two of known length."""
    result = outcomes("uneven_data_options")
    np.testing.assert_array_equal(result["steps"], [[4, 4]] * 2)
    brought = ["3, 2 batches in epoch 1", "3, 2 batches in epoch 2"]
    brought += ["4, 2 batches in epoch 1", "4, 2 batches in epoch 2", "3, 2 batches in epoch 1"]
    assert len(result["warnings"]) == len(brought)
    for warning, expected in zip(result["warnings"], brought, strict=True):
        assert expected in warning
    assert "The workers have 3, 2 batches, by rank" in result["errors"][0]
    assert "The workers have 4, 2 batches, by rank" in result["errors"][1]


def test_every_worker_predicts_every_row(outcomes: Outcomes) -> None:
    assert outcomes("predicts_every_row") < TOLERANCE
    assert outcomes("predicts_rank_data") < TOLERANCE
    np.testing.assert_array_equal(outcomes("predicts_every_kind"), np.ones((2, 8)))


def test_model_behaves_like_keras_on_every_worker(outcomes: Outcomes) -> None:
    np.testing.assert_array_equal(outcomes("model_edits_on_all_ranks"), [[1], [1]])


def test_rank_and_size_on_every_worker(outcomes: Outcomes) -> None:
    np.testing.assert_array_equal(outcomes("public_names"), [[0, 2, 1, 0], [1, 2, 0, 1]])


def test_chief_callbacks_write_once_and_restore_on_all_ranks(outcomes: Outcomes) -> None:
    result = outcomes("writes_and_restores")
    assert result["files"] == ["1.weights.h5", "2.weights.h5", "backup", "board", "log.csv"]
    np.testing.assert_array_equal(result["num_files"], [[5], [0]])
    assert result["rows"] == 2
    first, third = (chief_callbacks.plain(epochs) for epochs in (1, 3))
    np.testing.assert_array_equal(*result["first_epoch"])
    np.testing.assert_allclose(result["first_epoch"][0], first, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(result["resumed_epochs"], [[2, 1], [2, 1]])
    np.testing.assert_array_equal(*result["resumed"])
    np.testing.assert_allclose(result["resumed"][0], third, rtol=TOLERANCE, atol=TOLERANCE)


def test_chief_changing_the_model_within_an_epoch_raises(outcomes: Outcomes) -> None:
    error = outcomes("change_within_an_epoch_raises")
    assert "variables differ between ranks" in error
    assert "set chief_only = False" in error


def test_chief_callback_sees_every_batch(outcomes: Outcomes) -> None:
    np.testing.assert_array_equal(outcomes("sees_every_batch"), [[9], [0]])


def test_training_interrupted_on_one_rank_resumes(outcomes: Outcomes) -> None:
    result = outcomes("stops_and_resumes")
    np.testing.assert_array_equal(result["interrupted"], [[1], [1]])
    np.testing.assert_array_equal(result["num_files"], [[7], [0]])
    plain = resuming.accumulating()
    plain.fit(**resuming.FIT)
    for resumed, reference in zip(result["resumed"], result["reference"], strict=True):
        np.testing.assert_allclose(resumed, reference, rtol=1e-6, atol=1e-6)
    for resumed, weight in zip(result["resumed"], plain.get_weights(), strict=False):
        np.testing.assert_allclose(resumed, weight, rtol=TOLERANCE, atol=TOLERANCE)
