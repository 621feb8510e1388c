"""`notebook_launch`: return values, output and errors of functions on several workers."""

from __future__ import annotations

import os
import sys
import threading

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.support.starting import run
from tfdist.errors import LaunchError

#: As in a notebook's kernel: definitions are in no module that workers could import.
CELL = """
import tfdist
factor = 10

def fn():
    print("rank", tfdist.rank(), flush=True)
    return tfdist.rank() + factor * tfdist.size()

print(tfdist.notebook_launch(fn, num_workers=3))
"""


def test_function_defined_in_a_cell() -> None:
    done = run(sys.executable, "-c", CELL)
    assert done.stdout.splitlines() == ["rank 0", "30"]  # only the output of rank 0


def test_workers_are_separate_processes_of_one_cluster() -> None:
    def fn() -> tuple[int, int]:
        from tfdist import cluster

        return cluster.exchange_addresses(cluster.discover()).size, os.getpid()

    size, process_id = tfdist.notebook_launch(fn, num_workers=2)
    assert size == 2
    assert process_id != os.getpid()


def test_arguments_are_passed() -> None:
    def fn(first: int, *, second: int) -> int:
        return first + second

    assert tfdist.notebook_launch(fn, 1, args=(1,), kwargs={"second": 2}) == 3


def test_function_that_captures_a_model_raises() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])

    def inner() -> object:
        return model.fit

    with pytest.raises(LaunchError, match="a Sequential of this notebook"):
        tfdist.notebook_launch(lambda: inner())
    with pytest.raises(LaunchError, match="a EagerTensor of this notebook"):
        tfdist.notebook_launch(lambda x: x, args=(tf.constant(1),))
    with pytest.raises(LaunchError, match=r"cannot be pickled .*lock.*. Create it"):
        tfdist.notebook_launch(lambda x: x, kwargs={"x": threading.Lock()})


def test_error_contains_the_traceback_of_the_rank() -> None:
    def fn() -> None:
        if tfdist.rank() == 1:
            raise ValueError("batch without rows")
        import time

        time.sleep(600)

    with pytest.raises(LaunchError, match="rank 1 was the first to fail") as error:
        tfdist.notebook_launch(fn)
    assert "Traceback (most recent call last)" in str(error.value)
    assert "ValueError: batch without rows" in str(error.value)


def test_result_that_cannot_be_pickled_raises() -> None:
    def fn() -> object:
        return (number for number in range(3))

    with pytest.raises(LaunchError, match="generator, which cannot be pickled"):
        tfdist.notebook_launch(fn, num_workers=1)


def test_zero_workers_raise() -> None:
    with pytest.raises(LaunchError, match="expected at least 1"):
        tfdist.notebook_launch(lambda: None, num_workers=0)
