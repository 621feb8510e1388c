"""Sharded state is placed as planned, while the model appears complete to users."""

from __future__ import annotations

import copy
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.training import (
    FIT,
    X,
    assert_close,
    assert_resumes_from_another_strategy,
    assert_same_weights,
    build,
    momentum,
)
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.groups.base import LocalGroup, shard_sizes
from tfdist.strategies.sharded import plan
from tfdist.strategies.sharded.division import OverDevices, OverProcesses
from tfdist.strategies.sharded.plan import bytes_by_device
from tfdist.strategies.sharded.strategy import Sharded
from tfdist.trainer import Trainer
from tfdist.upstream.features import existing
from tfdist.upstream.keras_optimizers import optimizers_of_one_device
from tfdist.upstream.keras_variables import ShardedGradient, ShardedVariable, divide, share_identity
from tfdist.upstream.weight_files import READS_PIECES, FileArray

LONG = pytest.mark.long
IDS, LABELS = np.arange(30, dtype="int32").reshape(10, 3), np.ones((10, 3), "float32")
RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.normal(size=(3, 5)).astype("float32")
GRADIENTS = [RANDOM.normal(size=(3, 5)).astype("float32") for _ in range(2)]
#: Options with which an optimizer has further variables.
OPTIONS: dict[type, dict[str, Any]] = {
    keras.optimizers.SGD: {"momentum": 0.9, "nesterov": True},
    keras.optimizers.RMSprop: {"momentum": 0.9, "centered": True},
    keras.optimizers.Adam: {"amsgrad": True},
}


def wide() -> keras.Model:
    """Returns a model that shards evenly except for its table and a bias of three elements."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(40, 8)(inputs))
    model = keras.Model(inputs, layers.Dense(3)(layers.Dense(101, "tanh")(hidden)))
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse")
    return model


@pytest.mark.parametrize(
    "stage",
    [pytest.param("optimizer", marks=LONG), pytest.param("gradients", marks=LONG), "parameters"],
)
def test_each_device_holds_the_planned_shards(stage: str) -> None:
    strategy = Sharded(2, shard=stage, smallest=64)
    trainer = Trainer(wide, strategy)
    model, described = trainer.model, trainer.describe()
    planned = plan.plan(model, [model.optimizer], strategy.devices, 64, cuts_weights=True)
    wanted = planned.bytes_by_owner(strategy.devices, 3.0, stage != "parameters", False)
    trainer.fit(IDS, LABELS, batch_size=5, verbose=0)
    num_bytes = bytes_by_device(model.trainable_variables + model.optimizer.variables)
    scalars = 8 + 4  # the step counter and the learning rate
    assert num_bytes == {"CPU:0": wanted["CPU:0"] + scalars, "CPU:1": wanted["CPU:1"]}
    assert described["split"].startswith("89.7% of 3,151 parameters in 2 shards, the others whole")
    assert described["weights and optimizer state"].count("MB") == 2


def adapted(quantized: str | None) -> keras.Model:
    """Returns a model whose two large kernels are frozen, quantized, and adapted by LoRA."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((64,))
    hidden = layers.Dense(64, name="one")(layers.Dense(64, "relu", name="two")(inputs))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    for layer in (model.get_layer("one"), model.get_layer("two")):
        if quantized is not None:
            layer.quantize(quantized)
        layer.enable_lora(2)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-2), "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("strategy", ["sharded", "tensor_parallel", "pipeline"])
@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
def test_frozen_weights_are_divided(quantized: str | None, strategy: str) -> None:
    x = np.random.default_rng(1).normal(size=(8, 64)).astype("float32")
    y = x.sum(-1, keepdims=True) / 8
    plain, trainer = adapted(quantized), Trainer(adapted(quantized), strategy, devices=2)
    options: dict[str, Any] = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    losses = [one.fit(x, y, **options).history["loss"] for one in (plain, trainer)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    kernels = [v for v in trainer.model.non_trainable_variables if v.name == "kernel"]
    held = bytes_by_device(kernels)
    assert held["CPU:0"] == held["CPU:1"] == plan.num_bytes(kernels[0])
    for one, other in zip(plain.layers, trainer.model.layers, strict=True):
        for old, new in zip(one.variables, other.variables, strict=True):
            if not old.trainable:
                np.testing.assert_array_equal(np.asarray(new), np.asarray(old))


@pytest.mark.parametrize("first", ["sharded", "mirrored"])
def test_checkpoints_may_leave_out_frozen_weights(first: str, tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(8, 64)).astype("float32")
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "verbose": 0}
    checkpoints = tfdist.Checkpoints(tmp_path, frozen=False)

    def resume(strategy: str, epochs: int, shift: float = 0.0) -> keras.Model:
        model = adapted("int8")
        for weight in (v for v in model.non_trainable_variables if v.name == "kernel_scale"):
            weight.assign(weight + shift)
        trainer = Trainer(model, strategy, devices=2, checkpoints=checkpoints)
        trainer.fit(x, x[:, :1], epochs=epochs, **options)
        return trainer.model

    resume(first, 1)
    saved = tf.train.load_checkpoint(next(tmp_path.glob("epoch-*")) / "variables")
    assert not [s for s in saved.get_variable_to_shape_map().values() if math.prod(s) > 128]
    plain = adapted("int8")
    plain.fit(x, x[:, :1], epochs=2, **options)
    with pytest.raises(ConfigurationError, match="differs from the one"):
        resume("mirrored", 2, shift=1.0)
    assert_close(resume("sharded", 2).get_weights(), plain.get_weights())


def test_saved_model_is_loaded_in_shards_with_its_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fits_into_memory = momentum(), Mock(return_value=True)
    plain.fit(**FIT)
    plain.save(tmp_path / "model.keras")
    monkeypatch.setattr("keras.src.saving.saving_lib.is_memory_sufficient", fits_into_memory)
    trainer = Trainer(
        lambda: keras.saving.load_model(tmp_path / "model.keras"),
        Sharded(2, shard="parameters", smallest=1),
    )
    trainer.fit(**FIT)
    trainer.save(tmp_path / "again.keras")
    fits_into_memory.assert_not_called()  # else Keras would read or write the file at once
    plain.fit(**FIT)
    assert_same_weights(keras.saving.load_model(tmp_path / "again.keras"), plain)


def test_weights_are_sharded_before_the_next_one_is_made(tmp_path: Path) -> None:
    """No device has more than its shards and one whole weight, also while a file is loaded."""
    file, held = tmp_path / "model.weights.h5", list[dict[str, int]]()
    x = np.random.default_rng(1).normal(size=(8, 64)).astype("float32")

    def deep() -> keras.Model:
        keras.utils.set_random_seed(1)
        made, hidden = list[Any](), (inputs := keras.Input((64,)))
        for _ in range(5):
            made.append(layers.Dense(64, "tanh", use_bias=False))
            hidden = made[-1](hidden)
            held.append(bytes_by_device(layer.kernel for layer in made))
        seven = keras.Variable(np.ones(2000, "float32") * 7)  # no weight of the model
        model = keras.Model(inputs, layers.Lambda(lambda x: x * seven[0])(hidden))
        if file.exists():
            model.load_weights(file)
            held.append(bytes_by_device(model.trainable_variables))
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-2), "mse", jit_compile=False)
        return model

    first = deep()
    first.set_weights([weight + 0.01 for weight in first.get_weights()])
    first.save_weights(file)
    plain = deep()
    held.clear()
    trainer = Trainer(deep, Sharded(2))
    shards = [{"CPU:0": n * 8192, "CPU:1": n * 8192} for n in (1, 2, 3, 4, 5, 5)]
    assert held == shards
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    losses = [one.fit(x, x, **options).history["loss"] for one in (plain, trainer)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert bytes_by_device(trainer.model.trainable_variables) == shards[-1]


def test_array_of_a_file_computes_as_in_memory(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "array", "float32", "w+", shape=(3, 5))
    mapped[:] = WEIGHT
    array: Any = FileArray(mapped, str(tmp_path / "array"))
    for begin, end in ((0, 15), (0, 3), (3, 6), (7, 15), (5, 10)):
        np.testing.assert_array_equal(array.elements(begin, end), WEIGHT.ravel()[begin:end])
    np.testing.assert_array_equal(2 * array - array, WEIGHT)
    np.testing.assert_array_equal(keras.ops.transpose(array), WEIGHT.T)
    np.testing.assert_array_equal(copy.copy(array).T.astype("float64"), WEIGHT.T)
    assert (len(array), array.ndim, array[1, 2]) == (3, 2, WEIGHT[1, 2])
    array[1, 2] = 7
    assert array.elements(7, 8) == [7]
    array += 1
    assert array[1, 2] == 8
    np.testing.assert_array_equal(mapped, WEIGHT)


@pytest.mark.skipif(not READS_PIECES, reason="an older version of Keras")
def test_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elements, sizes = FileArray.elements, list[int]()

    def counted(array: FileArray, begin: int, end: int) -> np.ndarray:
        sizes.append(end - begin)
        return elements(array, begin, end)

    def network(dtype: str = "float32") -> keras.Model:
        """The first axis of one kernel is the whole row of another's."""
        inputs = keras.Input((1, 301))
        hidden = layers.Conv1D(17, 1, dtype=dtype)(inputs)
        model = keras.Model(inputs, layers.Dense(101, dtype=dtype)(hidden))
        model.compile("adam", "mse")
        return model

    def with_weights(file: str, **options: str) -> keras.Model:
        model = network(**options)
        model.load_weights(tmp_path / file)
        return model

    plain = network()
    plain.optimizer.build(plain.trainable_variables)
    for variable in plain.variables:
        variable.assign(RANDOM.normal(size=variable.shape).astype(variable.dtype))
    plain.save(tmp_path / "model.keras")
    plain.save_weights(tmp_path / "model.weights.h5")
    network("bfloat16").save_weights(tmp_path / "bfloat16.weights.h5")
    plain.save_weights(tmp_path / "model.weights.json", max_shard_size=3e-5)
    with (
        zipfile.ZipFile(tmp_path / "model.keras") as stored,
        zipfile.ZipFile(tmp_path / "zipped.keras", "w", zipfile.ZIP_DEFLATED) as zipped,
    ):
        for name in stored.namelist():
            zipped.writestr(name, stored.read(name))
    halves = [2559, 2558, 859, 858]
    for load, expected in (
        (lambda: keras.saving.load_model(tmp_path / "model.keras"), 3 * halves),
        (lambda: keras.saving.load_model(tmp_path / "zipped.keras"), []),
        (lambda: with_weights("model.keras"), halves),
        (lambda: with_weights("model.weights.h5"), halves),
        (lambda: with_weights("model.weights.h5", dtype="bfloat16"), halves),
        (lambda: with_weights("bfloat16.weights.h5"), halves[:2]),
        (lambda: with_weights("model.weights.json"), halves),
    ):
        sizes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(FileArray, "elements", counted)
            loaded = Trainer(load, Sharded(2)).model
        assert sorted(sizes) == sorted(expected)
        wanted = load()
        for one, other in zip(loaded.variables, wanted.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=one.path)


@pytest.mark.parametrize(
    "optimizer",
    [
        *existing(keras.optimizers, "Muon"),
        pytest.param(keras.optimizers.Lamb, marks=LONG),
        pytest.param(keras.optimizers.Adafactor, marks=LONG),
    ],
)
def test_matrix_optimizers_keep_each_matrix_on_one_device(optimizer: Any) -> None:
    def make() -> keras.Model:
        return build(optimizer())

    trainer = Trainer(make, Sharded(2, smallest=1))
    trainer.fit(**FIT)
    alone = make()
    alone.fit(**FIT)
    assert_close(trainer.model.get_weights(), alone.get_weights())
    num_bytes = bytes_by_device(trainer.model.trainable_variables)
    assert set(num_bytes) == {"CPU:0", "CPU:1"}
    assert "each element by itself" in trainer.describe()["split"]


def test_offloaded_state_is_on_the_host() -> None:
    trainer = Trainer(momentum, Sharded(2, smallest=2, offload="optimizer"))
    trainer.fit(**FIT)
    alone = momentum()
    alone.fit(**FIT)
    assert_close(trainer.model.get_weights(), alone.get_weights())
    cut = [v for v in trainer.model.optimizer.variables if isinstance(v, ShardedVariable)]
    assert bytes_by_device(cut).keys() == {"CPU:0"}
    assert "host" in trainer.describe()["offloaded"]


def test_resumes_from_another_strategy_and_back(tmp_path: Path) -> None:
    assert_resumes_from_another_strategy(momentum, Sharded(2, smallest=1), FIT, tmp_path)


def test_model_appears_complete_outside_of_training(tmp_path: Path) -> None:
    trainer = Trainer(momentum, Sharded(2, smallest=1))
    trainer.fit(**FIT)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(loaded.predict(X, verbose=0), trainer.predict(X, verbose=0))
    assert_close(loaded.predict(X, verbose=0), trainer.model.predict(X, verbose=0))
    assert_close(
        loaded.optimizer.momentums[0].numpy(), trainer.model.optimizer.momentums[0].numpy()
    )
    with pytest.raises(UnsupportedModelError, match="divided by the strategy of its"):
        trainer.model.fit(**FIT)


@pytest.mark.parametrize("stage", [pytest.param("gradients", marks=LONG), "parameters"])
def test_averages_are_swapped_in_for_evaluations(stage: str) -> None:
    def fitted(strategy: object) -> tuple[list[np.ndarray], dict[str, list[float]]]:
        def make() -> keras.Model:
            return build(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))

        trainer = Trainer(make, strategy)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        history = trainer.fit(**FIT, epochs=2, callbacks=[swap], validation_data=(X, X[:, :1]))
        return trainer.model.get_weights(), history.history

    found, wanted = fitted(Sharded(2, shard=stage, smallest=1)), fitted("one_device")
    assert_close(found[0], wanted[0])
    assert_close(found[1], wanted[1])


def test_optimizer_without_config_trains() -> None:
    def make() -> keras.Model:
        return build(keras.optimizers.SGD(learning_rate=lambda: 0.1))

    trainer = Trainer(make, Sharded(2, smallest=1))
    assert "weights and optimizer state" not in trainer.describe()
    trainer.fit(**FIT)


def test_weight_for_the_logits_of_a_table_is_sharded() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,), dtype="int32")
        table = layers.ReversibleEmbedding(30, 4, tie_weights=False)
        model = keras.Model(inputs, table(table(inputs), reverse=True))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss)
        return model

    plain, trainer = make(), Trainer(make, Sharded(2, shard="parameters", smallest=1))
    for runner in (plain, trainer):
        runner.fit(IDS, IDS[:, ::-1], batch_size=7, shuffle=False, verbose=0)
    assert_same_weights(trainer.model, plain)
    table, for_logits = trainer.model.trainable_variables
    assert isinstance(for_logits, ShardedVariable)
    assert not isinstance(table, ShardedVariable)


@pytest.mark.parametrize("entries", ["of its rows", "the same"])
def test_unsupported_sharding_raises(entries: str) -> None:
    with pytest.raises(ConfigurationError, match="expected one of optimizer, gradients"):
        Sharded(2, shard="all")

    class Rows(layers.Layer):
        def build(self, shape: tuple[int, ...]) -> None:
            self.table = self.add_weight(shape=(3, 3))

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            if entries == "the same":
                return tf.gather(self.table, [0, 1, 2])[0] + tf.cast(inputs, "float32")
            return tf.reduce_sum(tf.gather(self.table, inputs % 3), 1)

    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((3,), dtype="int32"), Rows()])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UnsupportedModelError, match=r"table.* no Embedding holds"):
        Trainer(make, Sharded(2, smallest=1)).fit(IDS, LABELS, verbose=0)


def test_sparse_gradient_of_a_sharded_table_keeps_its_slices() -> None:
    """Adam squares each slice of a row, so that several of them differ from their sum."""

    class Rows(layers.Layer):
        def build(self, shape: tuple[int, ...]) -> None:
            self.table = self.add_weight(shape=(5, 3), initializer="glorot_uniform")

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            positions = tf.gather(self.table, [0, 1, 1, 4])
            return tf.cast(inputs, "float32") / 30.0 + tf.tanh(tf.reduce_sum(positions**2, 0))

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), Rows(), layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.1, epsilon=1e-2, clipnorm=0.1), "mse")
        return model

    trainer, alone = Trainer(make, Sharded(2, shard="optimizer", smallest=1)), make()
    for runner in (trainer, alone):
        runner.fit(IDS, LABELS, batch_size=5, shuffle=False, verbose=0)
    assert isinstance(trainer.model.trainable_variables[0], ShardedVariable)
    assert_close(trainer.model.get_weights(), alone.get_weights())


def test_slices_of_a_table_with_more_elements_than_int32_counts_reach_their_shard() -> None:
    shape, last = [1 << 22, 1025], (1 << 22) - 1
    slices = tf.IndexedSlices(tf.ones([1, 1025]), tf.constant([last]), tf.constant(shape))
    *_, size = shard_sizes(math.prod(shape), 4)
    parts = OverDevices(4).cut(slices)
    assert [part.indices.shape[0] for part in parts] == [0, 0, 0, 1025]
    assert int(parts[-1].indices[-1]) == size - 1


class _OrderedGroup(LocalGroup):
    """Simulates a group over NCCL, whose collectives run in the order of tracing."""

    gathers_in_order = True

    def __init__(self, devices: Any) -> None:
        super().__init__()
        self.devices = devices


def test_sharded_weights_are_refused_where_gathers_have_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tfdist.cluster.started_together", lambda: object())
    monkeypatch.setattr("tfdist.strategies.sharded.strategy.CollectiveGroup", _OrderedGroup)
    with pytest.raises(ConfigurationError, match="Use process_group='horovod'"):
        Sharded(["CPU:0"], shard="parameters", process_group="tensorflow")


def test_a_loop_reads_weights_of_other_processes_before_it_starts() -> None:
    """TensorFlow runs rounds of a loop concurrently; ranks that gather in different orders hang."""
    read = Mock(side_effect=lambda number, part, sizes: part.read_value())
    coordinator = Mock(all_take_part=False, read=read, group=Mock(rank=0, size=1))
    division, part = OverProcesses(4, coordinator, Mock()), tf.Variable(tf.ones(4))

    @tf.function
    def sum_of_rounds() -> tf.Tensor:
        total = tf.zeros(4)
        for _ in tf.range(3):
            total += division.join([part], tf.TensorShape([4]), tf.float32)
        return total

    np.testing.assert_array_equal(sum_of_rounds(), [3, 3, 3, 3])
    read.assert_called_once()


def updated(make: Callable[[], keras.optimizers.Optimizer], is_sharded: bool) -> list[np.ndarray]:
    """Returns a weight and all optimizer variables after two updates."""
    weight, optimizer = keras.Variable(WEIGHT), make()
    optimizer.build([weight])
    if is_sharded:
        state = [v for v in optimizer.variables if v.shape == weight.shape]
        for variable in [weight, *state]:
            divide(variable, OverDevices(2), ["CPU:0", "CPU:0"], keep_whole=False)
            assert isinstance(variable, ShardedVariable)
            assert [part.shape for part in variable.parts] == [(8,), (7,)]
    for gradient in GRADIENTS:
        given: Any = tf.constant(gradient)
        if isinstance(weight, ShardedVariable):
            given = ShardedGradient(weight.cut(given))
        with optimizers_of_one_device():
            optimizer.apply([given], [weight])
    return [v.numpy() for v in (weight, *optimizer.variables)]


@pytest.mark.parametrize("kind", plan.ELEMENTWISE)
def test_shards_match_the_full_update(kind: Any) -> None:
    def make() -> keras.optimizers.Optimizer:
        common = {"learning_rate": 0.1, "weight_decay": 0.01, "use_ema": True}
        return kind(**common, global_clipnorm=2.0, **OPTIONS.get(kind, {}))

    for found, wanted in zip(updated(make, True), updated(make, False), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("clipping", [{"clipnorm": 0.5}, {"clipvalue": 0.3}])
def test_clipping_uses_full_gradients(clipping: dict[str, float]) -> None:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.1, **clipping)

    np.testing.assert_allclose(updated(make, True)[0], updated(make, False)[0], rtol=2e-6)


def test_matrix_optimizers_are_not_sharded() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    for kind in existing(keras.optimizers, "Lamb", "Muon", "Adafactor"):
        assert "each element" in str(plan.reason_whole(model, [kind()]))


def test_remainder_goes_to_the_first_shards() -> None:
    assert shard_sizes(11, 4) == [3, 3, 3, 2]


def test_optimizer_finds_a_shard_by_its_weight() -> None:
    one, other = tf.Variable(0.0), tf.Variable(0.0)
    share_identity(one, other)
    assert keras.optimizers.SGD()._var_key(one) == keras.optimizers.SGD()._var_key(other)
