"""Datasets of Ray Data as the input of `fit`, on workers of a real Ray cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import ray

import tfdist.ray
from tests.support.training import build
from tfdist.errors import ConfigurationError, DataError, LaunchError, Preempted
from tfdist.loops import interrupts
from tfdist.ray.data import share
from tfdist.ray.placement import connect
from tfdist.ray.reports import Blocks

NUM_ROWS, BATCH_SIZE = 21, 8


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 21, 64])
def test_shares_contain_each_row_once(num_rows: int, num_workers: int) -> None:
    """Also if neither the batch nor the blocks can be divided among the workers."""
    sizes = (num_rows // 3, 0, num_rows - num_rows // 3)
    blocks = Blocks(("first", "second", "third"), sizes)
    begins = dict(zip(blocks.refs, (0, sizes[0], sizes[0]), strict=True))
    rows, batch_sizes = [], []
    for worker in range(num_workers):
        start, stop, batch_size = share(num_rows, BATCH_SIZE, worker, num_workers)
        batch_sizes.append(batch_size)
        for ref, first, last in blocks.slices(start, stop):
            rows += range(begins[ref] + first, begins[ref] + last)
    assert rows == list(range(num_rows))
    assert sum(batch_sizes) == BATCH_SIZE


def test_batch_smaller_than_the_workers() -> None:
    with pytest.raises(ConfigurationError, match="batch_size=2 is smaller than the number of work"):
        share(21, 2, 0, 3)


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, np.ndarray]]:
    """Starts Ray, and returns the columns of a dataset."""
    ray.init(address="local", num_cpus=2, log_to_driver=False)
    x = np.random.default_rng(0).normal(size=(NUM_ROWS, 4)).astype("float32")
    yield {"x": x, "y": x[:, :1], "number": np.arange(NUM_ROWS)}
    ray.shutdown()


@pytest.mark.long
def test_training_equals_one_device_on_the_same_batches(rows: dict[str, np.ndarray]) -> None:
    def fn() -> tuple[list[int], bool, list[np.ndarray]]:
        trainer = tfdist.Trainer(build, strategy="multi_worker")
        trainer.fit(tfdist.ray.dataset("train", BATCH_SIZE, "x", "y"), epochs=2, verbose=0)
        numbers = tfdist.ray.dataset("train", BATCH_SIZE, "number", shuffle_buffer=5)
        batches = numbers(trainer.strategy.feed.input_context())
        epochs = [np.concatenate(list(batches.as_numpy_iterator())) for _ in range(2)]
        own = [np.bincount(epoch, minlength=NUM_ROWS) for epoch in epochs]
        counts = trainer.strategy.group.gather(np.concatenate(own)).sum(0)
        return counts.tolist(), not np.array_equal(*epochs), trainer.model.get_weights()

    items = [{name: column[row] for name, column in rows.items()} for row in range(NUM_ROWS)]
    dataset = ray.data.from_items(items, override_num_blocks=4)
    counts, reordered, weights = tfdist.ray.train(fn, 2, datasets={"train": dataset})
    assert counts == [1] * (2 * NUM_ROWS)
    assert reordered

    expected = build()
    shares = [share(NUM_ROWS, BATCH_SIZE, worker, 2) for worker in range(2)]
    for _ in range(2):
        for step in range(-(-NUM_ROWS // BATCH_SIZE)):
            batch = np.concatenate(
                [
                    np.arange(start, stop)[step * size : (step + 1) * size]
                    for start, stop, size in shares
                ]
            )
            expected.train_on_batch(rows["x"][batch], rows["y"][batch])
    for one, other in zip(weights, expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.usefixtures("rows")
def test_data_that_do_not_exist() -> None:
    def fn() -> list[str]:
        import tensorflow as tf

        messages = []
        for name, column in (("training", "x"), ("train", "z"), ("empty", "x")):
            try:
                tfdist.ray.dataset(name, 2, column)(tf.distribute.InputContext())
            except DataError as error:
                messages.append(str(error))
        return messages

    some = ray.data.from_items([{"x": 1.0}])
    assert tfdist.ray.train(fn, 1, datasets={"train": some, "empty": some.limit(0)}) == [
        "tfdist.ray.train has no dataset 'training'. Its datasets: empty, train.",
        "The Ray dataset has no column 'z'. Its columns: x.",
        "The Ray dataset 'empty' has no rows.",
    ]


def test_dataset_outside_of_a_worker() -> None:
    import tensorflow as tf

    with pytest.raises(LaunchError, match="outside of a function"):
        tfdist.ray.dataset("train", 2, "x")(tf.distribute.InputContext())


# ---- connecting ----


def test_unreachable_cluster_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray waits for minutes"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(LaunchError, match=r"no answer from 127\.0\.0\.1:1 .* Check RAY_ADDRESS"):
        connect()


def test_handler_of_ray_does_not_end_a_training_before_it_saves() -> None:
    with pytest.raises(ValueError, match="no port"):
        ray.init(address="no port")  # sets the handler before it reads the address
    before = signal.getsignal(signal.SIGTERM)
    assert before is not signal.SIG_DFL
    with pytest.raises(Preempted), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
