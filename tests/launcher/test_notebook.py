"""Functions on several workers: what comes back, what is shown, and what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.support.starting import ENVIRON
from tfdist.errors import LaunchError

#: As a notebook's kernel has it: what is defined here is in no module that workers could import.
CELL = """
import tfdist
factor = 10

def fn():
    print("rank", tfdist.rank(), flush=True)
    return tfdist.rank() + factor * tfdist.size()

print(tfdist.notebook_launch(fn, num_workers=3))
"""


def test_function_of_a_cell() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CELL],
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["rank 0", "30"]  # rank 0 alone is shown


def test_workers_know_each_other_and_are_other_processes() -> None:
    def fn() -> tuple[int, int]:
        from tfdist import cluster

        return cluster.exchange_addresses(cluster.discover()).size, os.getpid()

    size, process_id = tfdist.notebook_launch(fn, num_workers=2)
    assert size == 2
    assert process_id != os.getpid()


def test_arguments() -> None:
    def fn(first: int, *, second: int) -> int:
        return first + second

    assert tfdist.notebook_launch(fn, 1, args=(1,), kwargs={"second": 2}) == 3


def test_model_that_the_function_takes_with_it() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])

    def inner() -> object:
        return model.fit

    with pytest.raises(LaunchError, match="a Sequential of this notebook"):
        tfdist.notebook_launch(lambda: inner())
    with pytest.raises(LaunchError, match="a EagerTensor of this notebook"):
        tfdist.notebook_launch(lambda x: x, args=(tf.constant(1),))
    with pytest.raises(LaunchError, match=r"cannot be pickled .*lock.*: create it"):
        tfdist.notebook_launch(lambda x: x, kwargs={"x": threading.Lock()})


def test_error_of_a_rank_comes_with_its_traceback() -> None:
    def fn() -> None:
        if tfdist.rank() == 1:
            raise ValueError("batch without rows")
        import time

        time.sleep(600)

    with pytest.raises(LaunchError, match="rank 1 was the first to fail") as error:
        tfdist.notebook_launch(fn)
    assert "Traceback (most recent call last)" in str(error.value)
    assert "ValueError: batch without rows" in str(error.value)


def test_result_that_cannot_come_back() -> None:
    def fn() -> object:
        return (number for number in range(3))

    with pytest.raises(LaunchError, match="generator, which cannot be pickled"):
        tfdist.notebook_launch(fn, num_workers=1)


def test_no_worker() -> None:
    with pytest.raises(LaunchError, match="expected at least 1"):
        tfdist.notebook_launch(lambda: None, num_workers=0)
