"""Ways to train, evaluate and predict a workload, each as a function that measures once.

Training is measured in the second of two epochs of the same length, because `fit` creates the data
iterator and chooses the number of steps per call in the first one. For `evaluate` and `predict`,
the whole call is measured.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfdist import strategies
from tfdist.console import folders, tables
from tfdist.tools.bench import by_hand
from tfdist.tools.bench.workloads import Workload
from tfdist.trainer import Trainer
from tfdist.upstream.tensorflow_graphs import graphs_run_by

#: `steps_per_execution` of the contender "Keras, in graph".
STEPS_PER_EXECUTION = 32
#: Rows of the table that are compared with another row than "tfdist".
COUNTERPARTS = {"Keras, every batch": "tfdist, every batch"}
_MAX_ROWS = 16


@dataclass(frozen=True)
class Sample:
    """One measurement: milliseconds per step of wall-clock and processor time, and the loss."""

    ms: float
    cpu_ms: float
    loss: float


Measure = Callable[[], Sample]


@dataclass(frozen=True)
class Case:
    """A workload on a number of replicas, for all contenders.

    Attributes:
        model: Name of the workload.
        workload: The model and its data.
        strategy: One object for all contenders, because plain Keras fails with a second
            `tf.distribute.MirroredStrategy` in a process (tensorflow#62790).
        num_steps: Steps of a measurement.
        exchange: Averages the gradients of the manual loop over processes, or None.
    """

    model: str
    workload: Workload
    strategy: strategies.Strategy
    num_steps: int
    exchange: by_hand.Exchange | None = None

    @property
    def steps_per_execution(self) -> int:
        """Keras's `steps_per_execution`, which must not exceed the number of steps."""
        return min(STEPS_PER_EXECUTION, self.num_steps)

    @contextlib.contextmanager
    def scope(self) -> Iterator[tf.distribute.Strategy | None]:
        """Sets the dtype policy and TensorFlow's strategy for Keras's own model."""
        strategy = getattr(self.strategy, "tf_strategy", None)
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.workload.precision)
        try:
            with strategy.scope() if strategy is not None else contextlib.nullcontext():
                yield strategy
        finally:
            keras.config.set_dtype_policy(policy)

    def trainer(self, **options: Any) -> Trainer:
        """Returns tfdist's trainer."""
        options |= {"strategy": self.strategy, "precision": self.workload.precision}
        return Trainer(self.workload.build_model, **options)

    def keras_model(self, in_graph: bool) -> keras.Model:
        """Returns Keras's model; `in_graph` sets `steps_per_execution`."""
        options = {"steps_per_execution": self.steps_per_execution} if in_graph else {}
        with self.scope():
            return self.workload.build_model(**options)


class Clock:
    """Measures wall-clock time and the processor time of all threads from its creation."""

    def __init__(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def sample(self, num_steps: int, loss: float) -> Sample:
        """Returns the time per step; the results of the steps must have been fetched."""
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        return Sample(1e3 * seconds / num_steps, 1e3 * cpu / num_steps, loss)


def fit_by_tfdist(case: Case) -> Measure:
    """`tfdist.Trainer.fit`."""
    return _measure_fit(case.trainer().fit, case)


def fit_by_hand(case: Case) -> Measure:
    """A hand-written loop; see `by_hand`."""
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


def available(case: Case, method: str) -> dict[str, Callable[[Case], Measure]]:
    """Returns the contenders of a method of the trainer, in the order of the table.

    Args:
        case: The case to measure.
        method: "fit", "evaluate", "predict", or "checks": `fit` with and without the checks
            between workers.
    """
    if method == "fit":
        return {
            "tfdist": fit_by_tfdist,
            "tfdist, every batch": lambda case: _measure_fit(
                case.trainer().fit, case, _OnEveryBatch()
            ),
            "by hand": fit_by_hand,
            # Keras comes last, so that the others are measured even if it fails.
            "Keras": lambda case: _measure_fit(case.keras_model(False).fit, case),
            "Keras, every batch": lambda case: _measure_fit(
                case.keras_model(False).fit, case, _OnEveryBatch()
            ),
            "Keras, in graph": lambda case: _measure_fit(case.keras_model(True).fit, case),
        }
    if method == "checks":
        off = {"check_data": "off", "check_ranks": "off"}
        return {
            "tfdist": fit_by_tfdist,
            "checks off": lambda case: _measure_fit(case.trainer(**off).fit, case),
        }
    call = functools.partial(_measure_call, method)
    contenders: dict[str, Callable[[Case], Measure]] = {
        "tfdist": lambda case: call(case, case.trainer())
    }
    if case.strategy.num_replicas == 1:
        contenders["by hand"] = functools.partial(_inference_by_hand, method)
    contenders["Keras"] = lambda case: call(case, case.keras_model(False))
    contenders["Keras, in graph"] = lambda case: call(case, case.keras_model(True))
    return contenders


class _EpochTimer(keras.callbacks.Callback):
    """Times the last epoch, from before its first batch until its logs are available."""

    sample: Sample

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._clock = Clock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.sample = self._clock.sample(self.params["steps"], float(logs["loss"]))


class _OnEveryBatch(keras.callbacks.Callback):
    """The cheapest callback that reads the loss of every batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.loss = logs["loss"]


def _measure_fit(
    fit: Callable[..., Any], case: Case, *callbacks: keras.callbacks.Callback
) -> Measure:
    """Measures the second of two epochs of Keras's or of tfdist's `fit`."""
    data, timer = case.workload.data(), _EpochTimer()

    def measure() -> Sample:
        fit(
            data,
            epochs=2,
            steps_per_epoch=case.num_steps,
            verbose=0,
            shuffle=False,  # avoids the warning that a dataset is not shuffled
            callbacks=[timer, *callbacks],
        )
        return timer.sample

    return measure


def _measure_call(method: str, case: Case, model: Trainer | keras.Model) -> Measure:
    data, call = case.workload.data(), getattr(model, method)

    def measure() -> Sample:
        clock = Clock()
        result = call(data, steps=case.num_steps, verbose=0)
        value = result[0] if method == "evaluate" else float(np.mean(result))
        return clock.sample(case.num_steps, value)

    return measure


def _inference_by_hand(method: str, case: Case) -> Measure:
    with case.scope():
        data, model = case.workload.data(), case.workload.build_model()
    loop = by_hand.evaluating(model) if method == "evaluate" else by_hand.predicting(model)

    def measure() -> Sample:
        clock = Clock()
        return clock.sample(case.num_steps, loop(iter(data), case.num_steps))

    return measure


class Trace(NamedTuple):
    """The step of one variant.

    Attributes:
        operations: Number of operations of each type in the loop's optimized graph.
        microseconds: Time per step, by type of operation or stage of `tf.data`.
    """

    operations: Counter[str]
    microseconds: dict[str, float]


def show_profile(case: Case) -> None:
    """Traces both variants and prints their largest differences.

    The optimized graph has each operation once. The profiler's trace has durations of operations
    that TensorFlow considers expensive, and of the stages of `tf.data`, which run in separate
    threads. The time of a stage includes the previous stages.
    """
    ours, theirs = _trace(case, fit_by_tfdist), _trace(case, fit_by_hand)
    tables.text(
        f"{case.model}, {case.strategy.num_replicas} replicas: the loop's graph has "
        f"{ours.operations.total()} operations with tfdist, and {theirs.operations.total()} by hand"
    )
    _show_differences("operations in the graph", ours.operations, theirs.operations, 0)
    _show_differences("microseconds per step", ours.microseconds, theirs.microseconds, 1)


def _trace(case: Case, prepare: Callable[[Case], Measure]) -> Trace:
    measure = prepare(case)
    # Operations of the largest optimized graph that a first call runs.
    graphs = graphs_run_by(measure)
    counts = [Counter(n.op for one in g.partition_graphs for n in one.node) for g in graphs]
    operations = max(counts, key=Counter.total)
    with folders.temporary() as folder:
        with tf.profiler.experimental.Profile(folder):
            measure()
        (file,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    totals: Counter[str] = Counter()
    for plane in space.planes:
        names = {key: _type_of(meta.name) for key, meta in plane.event_metadata.items()}
        for event in (event for line in plane.lines for event in line.events):
            if name := names[event.metadata_id]:
                totals[name] += event.duration_ps
    microseconds = {name: total / 1e6 / case.num_steps for name, total in totals.items()}
    return Trace(operations, microseconds)


def _type_of(event: str) -> str | None:
    """Returns the type of an operation (`node:Type`) or a stage of `tf.data`, or None."""
    if event.startswith("Iterator::Root::"):
        stage = event.partition("#")[0].removeprefix("Iterator::Root::")
        return f"tf.data: {stage}" if "[" not in stage else None  # one per repetition
    _, colon, kind = event.rpartition(":")
    return kind if colon and kind.isidentifier() and "::" not in event else None


def _show_differences(
    heading: str, ours: Mapping[str, float], theirs: Mapping[str, float], decimals: int
) -> None:
    rows = [(name, ours.get(name, 0), theirs.get(name, 0)) for name in ours.keys() | theirs.keys()]
    largest = sorted(rows, key=lambda row: (-abs(row[1] - row[2]), row[0]))[:_MAX_ROWS]
    tables.numbers(
        (heading, "tfdist", "by hand", "difference"),
        [
            (name, f"{a:.{decimals}f}", f"{b:.{decimals}f}", f"{a - b:+.{decimals}f}")
            for name, a, b in largest
        ],
    )
