"""Workers that diverge are detected. Two ranks are two threads that communicate in memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state

from tests.support.case import compiled, mlp
from tests.support.training import build, building
from tfdist.errors import ClusterError
from tfdist.groups.base import LocalGroup
from tfdist.loops.epoch import Call, Epoch
from tfdist.loops.rank_checks import CheckRanks, RankChecks, check_modes
from tfdist.strategies.inner_loop import LoopResult
from tfdist.upstream.keras_optimizers import optimizers_of

_CALL = Call(0, LoopResult(1, 4, 0.0), 1.0, {})


class Threads(LocalGroup):
    """A group of threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, rows: list[Any]) -> None:
        super().__init__()
        self.rank, self.size = rank, len(rows)
        self._meeting, self._rows = barrier, rows

    def gather_words(self, words: np.ndarray) -> np.ndarray:
        self._rows[self.rank] = words
        self._meeting.wait(60)
        gathered = np.stack(self._rows)
        self._meeting.wait(60)
        return gathered


Act = Callable[[int, RankChecks, keras.Model], None]


def errors(
    builders: Sequence[Callable[[], keras.Model]],
    act: Act,
    modes: Sequence[CheckRanks] = ("auto", "auto"),
) -> list[str]:
    """Returns the error message of each rank, or an empty string."""
    barrier, rows = threading.Barrier(len(builders)), [None] * len(builders)
    models = [make() for make in builders]

    def on(rank: int) -> str:
        model, group = models[rank], Threads(rank, barrier, rows)
        strategy: Any = SimpleNamespace(group=group)
        states = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
        functions: Any = SimpleNamespace(variables=lambda: {"all": model.variables + states})
        run: Any = SimpleNamespace(model=model, strategy=strategy, functions=functions)
        checks = RankChecks(run, modes[rank], {"remat": "none"})
        checks.begin_epoch(epoch("epoch 1"))
        try:
            check_modes(strategy, modes[rank])
            if modes[rank] != "off":
                act(rank, checks, model)
        except ClusterError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(builders)) as pool:
        return list(pool.map(on, range(len(builders))))


def epoch(name: str) -> Epoch:
    return Epoch(name, SimpleNamespace())  # type: ignore[arg-type]


def begin(rank: int, checks: RankChecks, model: keras.Model) -> None:
    checks.compare_configurations({"epochs": 2})


def squared(y_true: Any, y_pred: Any) -> Any:
    return tf.square(y_true - y_pred)


def tripled(y_true: Any, y_pred: Any) -> Any:
    return tf.square(y_true - 3 * y_pred)


tripled.__name__ = "squared"


def scaled(factor: float) -> Callable[[Any, Any], Any]:
    return lambda y_true, y_pred: tf.square(y_true - factor * y_pred)


class Twice(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return 2 * inputs


class Thrice(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return 3 * inputs


class CustomModel(keras.Model):
    """A model class without a config."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(3, activation), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a config."""

    def __call__(self, step: Any) -> Any:
        return 0.1 / (1.0 + tf.cast(step, tf.float32))


def sgd(**options: Any) -> Callable[[], keras.Model]:
    return lambda: build(keras.optimizers.SGD(0.1, **options))


def dense(activation: Any) -> Callable[[], keras.Model]:
    return building(lambda: [keras.Input((4,)), keras.layers.Dense(3, activation)])


def with_loss_scale() -> keras.Model:
    model = build(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    model.optimizer.build(model.trainable_variables)
    return model


def functional() -> keras.Model:
    """A model with operations that are no layers: a mask and two sums."""
    inputs = keras.Input((4,), dtype="int32")
    embedded = keras.layers.Embedding(5, 3, mask_zero=True)(inputs)
    inner = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(embedded) + 1.0)
    return compiled(keras.Model(inputs, inner(inputs) + 1.0))


def named_as_settings() -> keras.Model:
    """A model with operations whose first names are also settings and values of settings."""
    inputs = keras.Input((4, 3))
    tanh = keras.layers.Activation("tanh")(inputs)
    both = keras.layers.Bidirectional(keras.layers.LSTM(2, dropout=0.1), "sum")(tanh)
    dropped = keras.layers.Dropout(0.1)(both)
    return compiled(keras.Model(inputs, keras.ops.sum(dropped, 1, keepdims=True)))


def with_optimizer_map() -> keras.Model:
    """A model whose optimizer names variables by their paths."""
    model = mlp()
    optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    optimizers[model.trainable_variables[0].path] = keras.optimizers.SGD(0.2)
    return compiled(model, keras.optimizers.MultiOptimizer(optimizers))


ALIKE: dict[str, Callable[[], keras.Model]] = {
    "sequential": build,
    "custom loss": functools.partial(build, loss=squared),
    "lambda": dense(lambda x: x),
    "custom layer": building(lambda: [keras.Input((4,)), Twice()]),
    "custom model": lambda: compiled(CustomModel("relu")),
    "functional": functional,
    "named as settings": named_as_settings,
    "not built": building(lambda: [keras.layers.Dense(1)]),
    "several metrics": functools.partial(build, metrics=["mae", keras.metrics.MeanSquaredError()]),
    "loss scale": with_loss_scale,
    "optimizer map": with_optimizer_map,
    "schedule": lambda: build(
        keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    ),
    "array": building(
        lambda: [
            keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(np.eye(4, 3)))
        ]
    ),
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_models_of_the_same_code_match(make: Callable[[], keras.Model]) -> None:
    """Although Keras numbers the layer names of the second model differently."""
    global_state.set_global_attribute("object_name_uids", None)  # the first names have no numbers
    assert errors([make, make], begin) == ["", ""]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (sgd(momentum=0.9), sgd(momentum=0.5), "optimizer / config / momentum is 0.9 on rank 0 and "
         "0.5 on rank 1"),
        (dense("relu"), dense("tanh"), "activation is relu on rank 0 and tanh on rank 1"),
        (sgd(), lambda: build(keras.optimizers.Adam()), "optimizer / class / name is SGD"),
        (sgd(), lambda: build(loss="mae"), "loss is mse on rank 0 and mae on rank 1"),
        (lambda: build(loss=squared), lambda: build(loss=tripled), "loss / code is "),
        (lambda: build(loss=scaled(1.0)), lambda: build(loss=scaled(2.0)), "loss / code is "),
        (sgd(), lambda: build(metrics=["mae"]), "metrics"),
        (building(lambda: [keras.Input((4,)), Twice()]),
         building(lambda: [keras.Input((4,)), Thrice()]), "Twice on rank 0 and Thrice on rank 1"),
        (lambda: compiled(CustomModel("relu")), lambda: compiled(CustomModel("tanh")),
         "activation is relu"),
        (lambda: compiled(mlp()), lambda: compiled(mlp(features=5)), "4 on rank 0 and 5 on rank 1"),
    ],
    ids=["momentum", "activation", "optimizer", "loss", "code of the loss", "closure", "metrics",
         "layer", "custom model", "shape"],
)  # fmt: skip
def test_reports_the_first_difference_in_configuration(
    first: Callable[[], keras.Model], second: Callable[[], keras.Model], expected: str
) -> None:
    for error in errors([first, second], begin):
        assert expected in error
    assert errors([first, second], begin, ("off", "off")) == ["", ""]


def test_different_options_or_modes_raise() -> None:
    def different(rank: int, checks: RankChecks, model: keras.Model) -> None:
        checks.compare_configurations({"epochs": 2 + rank})

    assert "epochs is 2 on rank 0 and 3 on rank 1" in errors([build, build], different)[1]
    assert "auto, off, by rank" in errors([build, build], begin, ("auto", "off"))[0]


def call_once(checks: RankChecks, change: Callable[[], Any] | None = None) -> None:
    """Runs one call of the loop, during which a rank may change something."""
    checks.begin_call(0)
    if change:
        change()
    checks.end_call(_CALL)
    checks.compare(checks._strategy.group.gather(checks.columns(_CALL.result)))


@pytest.mark.parametrize(
    ("make", "change", "expected"),
    [
        (build, lambda m: setattr(m.optimizer, "learning_rate", 0.5),
         "optimizer / learning_rate is 0.1"),
        (sgd(momentum=0.9), lambda m: setattr(m.optimizer, "momentum", 0.5),
         "optimizer / momentum is 0.9 on rank 0 and 0.5 on rank 1"),
        (sgd(weight_decay=0.1), lambda m: setattr(m.optimizer, "weight_decay", 0.2),
         "optimizer / weight_decay is 0.1"),
        (lambda: build(keras.optimizers.Adam(Falling())),
         lambda m: setattr(m.optimizer, "beta_1", 0.5), "optimizer / beta_1 is 0.9 on rank 0"),
        (build, lambda m: setattr(m.layers[0], "trainable", False),
         "(Dense) is True on rank 0 and False on rank 1"),
        (with_loss_scale, lambda m: m.optimizer.dynamic_scale.assign(4.0), "dynamic_scale"),
    ],
    ids=["rate", "momentum", "weight decay", "custom schedule", "trainable", "loss scale"],
)  # fmt: skip
def test_different_hyperparameters_raise(
    make: Callable[[], keras.Model], change: Callable[[keras.Model], Any], expected: str
) -> None:
    def act(rank: int, checks: RankChecks, model: keras.Model) -> None:
        call_once(checks, lambda: rank and change(model))

    for error in errors([make, make], act):
        assert expected in error
        assert "before step 2 of epoch 1" in error


class BeforeBatches(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None: ...


@pytest.mark.parametrize("of_epoch", [True, False], ids=["epoch begins", "batch begins"])
def test_hyperparameters_are_compared_before_the_call_that_uses_them(of_epoch: bool) -> None:
    """Although the callback that changes them between two calls exists on one rank only."""

    def act(rank: int, checks: RankChecks, model: keras.Model) -> None:
        callbacks = [BeforeBatches()] if rank and not of_epoch else []
        checks.compare_configurations({}, callbacks)
        call_once(checks)
        if of_epoch:
            checks.begin_epoch(epoch("epoch 1"))
        model.optimizer.learning_rate = 0.1 + rank
        checks.begin_call(1)
        raise AssertionError("the call would begin")

    for error in errors([build, build], act):
        assert "optimizer / learning_rate is 0.1" in error
        assert "before step 2 of epoch 1" in error


def test_calls_without_callbacks_need_no_further_exchange() -> None:
    def act(rank: int, checks: RankChecks, model: keras.Model) -> None:
        checks.compare_configurations({}, [keras.callbacks.TensorBoard("unused")])
        call_once(checks)
        num_exchanges = []
        checks._strategy.group.before_exchange(lambda: num_exchanges.append(1))
        call_once(checks)
        assert len(num_exchanges) == 1

    assert errors([build, build], act) == ["", ""]


def test_reports_changed_weight_ranks_and_last_agreement() -> None:
    def act(rank: int, checks: RankChecks, model: keras.Model) -> None:
        call_once(checks)
        checks.begin_epoch(epoch("epoch 2"))
        weight = model.layers[1].kernel
        call_once(checks, lambda: rank == 2 and weight.assign_add(weight * 0 + 0.25))

    modes: list[CheckRanks] = ["every-call"] * 3
    for error in errors([build] * 3, act, modes):
        assert "1 of 6 variables differ between ranks after step 1 of epoch 2" in error
        assert "kernel' on rank 2, by up to 0.25" in error
        assert "last equal at step 1 of epoch 1" in error


def test_weights_that_were_edited_between_trainings_raise() -> None:
    def act(rank: int, checks: RankChecks, model: keras.Model) -> None:
        call_once(checks)
        checks.begin_training()
        checks.begin_epoch(epoch("epoch 1"))
        call_once(checks)
        checks.compare_variables()
        model.layers[1].kernel.assign_add(model.layers[1].kernel * rank)
        checks.begin_training()

    for error in errors([build, build], act):
        assert "1 of 6 variables differ between ranks at the beginning" in error
        assert "last equal at the end of the previous training" in error


def test_rank_0_decides_when_variables_are_compared() -> None:
    """By the time since the last comparison, which workers measure differently."""
    compared: list[list[bool]] = [[], []]

    def act(rank: int, checks: RankChecks, model: keras.Model) -> None:
        def take_digest() -> float:
            checks._cost = 0.019 if rank == 0 else 7.0
            return 1.0

        checks._take_digest = take_digest  # type: ignore[method-assign]
        for step, seconds in enumerate((1.0, 1.0, 1.0, 0.5, 0.5, 0.5)):
            before = checks._agreed_at
            checks.begin_call(step)
            checks.end_call(_CALL._replace(last_step=step, seconds=seconds))
            checks.compare(checks._strategy.group.gather(checks.columns(_CALL.result)))
            compared[rank].append(checks._agreed_at != before)

    assert errors([build, build], act) == ["", ""]
    assert compared == [[True, False, False, True, False, False]] * 2


def test_timed_checkpoint_waits_for_a_comparison() -> None:
    def act(rank: int, checks: RankChecks, model: keras.Model) -> None:
        found = []
        for _ in range(4):
            call_once(checks)
            checks._cost = 1e9
            found.append(checks.have_compared())
        assert found == [True, False, False, True]

    assert errors([build, build], act) == ["", ""]
