"""Ways to train a workload, each as a function that measures once.

A measurement is the second of two epochs of the same length: in the first the data iterator is made
and `fit` finds its pace, which is not what a step costs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist import strategies
from tfdist.bench.step import by_hand
from tfdist.bench.step.workloads import Workload
from tfdist.trainer import Trainer

#: `steps_per_execution` of the Keras contender that has one.
STEPS_PER_EXECUTION = 32


@dataclass(frozen=True)
class Sample:
    """One measurement: milliseconds per step by the clock and of the processor, and the loss."""

    ms: float
    cpu_ms: float
    loss: float


Measure = Callable[[], Sample]


@dataclass(frozen=True)
class Case:
    """A workload on a number of replicas, the same for all contenders.

    Attributes:
        model: Which of the workloads it is.
        workload: What is trained.
        strategy: One object for all of them; a second `tf.distribute.MirroredStrategy` in one
            process makes plain Keras fail (tensorflow#62790).
        num_steps: Of one measurement.
        exchange: How the gradients of a loop by hand cross processes that TensorFlow does not join.
    """

    model: str
    workload: Workload
    strategy: strategies.Strategy
    num_steps: int
    exchange: by_hand.Exchange | None = None

    @property
    def steps_per_execution(self) -> int:
        """As plain Keras gets it; no more than there are steps."""
        return min(STEPS_PER_EXECUTION, self.num_steps)

    @contextlib.contextmanager
    def scope(self) -> Iterator[tf.distribute.Strategy | None]:
        """In it Keras's own model is built; yields TensorFlow's strategy, if several replicas."""
        strategy = getattr(self.strategy, "tf_strategy", None)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            yield strategy


def in_loop(case: Case) -> Measure:
    """`tfdist.Trainer.fit`."""
    trainer = Trainer(case.workload.build_model, strategy=case.strategy)
    return _of_fit(trainer.fit, case)


def every_batch(case: Case) -> Measure:
    """`tfdist.Trainer.fit` with a callback that wants to be called after every batch."""
    trainer = Trainer(case.workload.build_model, strategy=case.strategy)
    return _of_fit(trainer.fit, case, _OnEveryBatch())


def keras_fit(case: Case) -> Measure:
    """`keras.Model.fit` as it comes, but silent."""
    with case.scope():
        model = case.workload.build_model()
    return _of_fit(model.fit, case)


def keras_in_graph(case: Case) -> Measure:
    """`keras.Model.fit` with `steps_per_execution`."""
    with case.scope():
        model = case.workload.build_model(steps_per_execution=case.steps_per_execution)
    return _of_fit(model.fit, case)


def hand_written(case: Case) -> Measure:
    """A loop written by hand; see `by_hand`."""
    data = case.workload.data()
    with case.scope() as strategy:
        model = case.workload.build_model()
        if strategy is None:
            loop = by_hand.on_one_device(model, case.exchange)
        else:
            loop = by_hand.mirrored(model, strategy, case.workload.batch_size)
            data = strategy.experimental_distribute_dataset(data)

    def measure() -> Sample:
        iterator = iter(data)
        loop(iterator, case.num_steps)
        clock = Clock()
        return clock.sample(case.num_steps, loop(iterator, case.num_steps))

    return measure


#: In the order of the table. Keras comes last: its failure must not be met by the others.
CONTENDERS: dict[str, Callable[[Case], Measure]] = {
    "tfdist": in_loop,
    "tfdist, every batch": every_batch,
    "by hand": hand_written,
    "Keras": keras_fit,
    "Keras, in graph": keras_in_graph,
}


class Clock:
    """Counts from when it is made: time, and what all threads of the process computed."""

    def __init__(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def sample(self, num_steps: int, loss: float) -> Sample:
        """Stops; the steps' results must have been fetched."""
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        return Sample(1e3 * seconds / num_steps, 1e3 * cpu / num_steps, loss)


class _Timer(keras.callbacks.Callback):
    """Times the last epoch, from before its first batch to when its logs are there."""

    sample: Sample

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._clock = Clock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.sample = self._clock.sample(self.params["steps"], float(logs["loss"]))


class _OnEveryBatch(keras.callbacks.Callback):
    """Does as little as a callback can that reads each batch's loss."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.loss = logs["loss"]


def _of_fit(fit: Callable[..., Any], case: Case, *callbacks: keras.callbacks.Callback) -> Measure:
    """Measures the second of two epochs of Keras's or of our `fit`."""
    data, timer = case.workload.data(), _Timer()

    def measure() -> Sample:
        fit(
            data,
            epochs=2,
            steps_per_epoch=case.num_steps,
            verbose=0,
            shuffle=False,  # both would warn that they do not shuffle a data set
            callbacks=[timer, *callbacks],
        )
        return timer.sample

    return measure
