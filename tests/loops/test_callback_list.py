"""Selection and order of each worker's callbacks, passed as a list or as a container."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import callbacks as kc

from tfdist.callbacks.progress import ProgressBar
from tfdist.loops.callbacks import create_callback_list


class Worker:
    """A strategy whose group gathers identical numbers from all ranks."""

    def __init__(self, rank: int, num_workers: int = 2) -> None:
        self.group, self.is_chief = self, rank == 0
        self._num_workers = num_workers

    def gather(self, numbers: list[float]) -> np.ndarray:
        return np.asarray([numbers] * self._num_workers)


class Writer(kc.Callback):
    chief_only = True


def create(callbacks: Any, worker: Worker, progress: Any = None) -> kc.CallbackList:
    model = keras.Model()
    return create_callback_list(callbacks, progress, worker, add_history=True, model=model)


def names(container: kc.CallbackList) -> list[str]:
    return [type(callback).__name__ for callback in container.callbacks]


def test_keeps_the_order_with_the_progress_bar_last() -> None:
    callbacks = [[kc.EarlyStopping()], Writer(), kc.TerminateOnNaN()]
    chief, other = (create(callbacks, Worker(rank), ProgressBar(None)) for rank in (0, 1))
    assert names(other) == ["EarlyStopping", "TerminateOnNaN", "ProgressBar", "History"]
    assert names(chief) == ["EarlyStopping", "Writer", *names(other)[1:]]


def test_one_worker_is_the_chief() -> None:
    assert names(create(Writer(), Worker(0, num_workers=1))) == ["Writer", "History"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_container_is_not_changed(num_workers: int) -> None:
    container = kc.CallbackList([Writer() if num_workers == 1 else kc.TerminateOnNaN()])
    assert create(container, Worker(0, num_workers), ProgressBar(None)) is container


@pytest.mark.parametrize("rank", [0, 1])
def test_variables_are_compared_if_the_chief_may_change_them(rank: int) -> None:
    reader = Writer()
    reader.only_reads = True
    assert type(create([reader], Worker(rank))) is kc.CallbackList
    assert type(create([reader, Writer()], Worker(rank))) is not kc.CallbackList
    assert type(create([Writer()], Worker(0, num_workers=1))) is kc.CallbackList


def test_other_workers_drop_the_chiefs_callbacks() -> None:
    model = keras.Model()
    container = kc.CallbackList([Writer(), kc.TerminateOnNaN()], model=model, epochs=3)
    other = create(container, Worker(1), ProgressBar(None))
    assert names(other) == ["TerminateOnNaN"]
    assert other.callbacks[0].params == {"epochs": 3}
    assert names(container) == ["Writer", "TerminateOnNaN"]
