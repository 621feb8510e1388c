"""Pipeline parallelism: placement, order of execution and results."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.case import compiled
from tests.support.training import X, Y, assert_same_weights
from tfdist.errors import ConfigurationError
from tfdist.strategies import create
from tfdist.strategies.pipeline.schedule import Kind, Order, Pass
from tfdist.strategies.pipeline.strategy import Pipeline
from tfdist.upstream.tensorflow_graphs import Dependencies


def build() -> keras.Model:
    """Returns a nested model and a skip connection around it."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    first = layers.Dense(6, activation="tanh", name="first")(inputs)
    inner = keras.Sequential(
        [keras.Input((6,)), layers.Dense(6, "tanh", name="inner"), layers.Dense(6)]
    )
    hidden = layers.Concatenate(name="skip")([inner(first), first])
    outputs = layers.Dense(1, name="last")(hidden * 2.0)
    optimizer = keras.optimizers.AdamW(0.05, epsilon=1e-2, global_clipnorm=0.3, use_ema=True)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return compiled(keras.Model(inputs, outputs), optimizer, metrics=["mae"])


@pytest.mark.parametrize(
    "order", ["interleaved", pytest.param("gpipe", marks=pytest.mark.long), "1f1b", "zb"]
)
def test_stages_are_on_their_devices_and_match_one_device(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward_passes, original = set(), Order.has_gone_back

    def recording(self: Order, stage: int, micro_batch: int, gradients: list, **kw: bool) -> None:
        backward_passes.add((stage, micro_batch))
        original(self, stage, micro_batch, gradients, **kw)

    monkeypatch.setattr(Order, "has_gone_back", recording)
    fit = {"x": X, "y": Y, "batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
    plain = build()
    losses = plain.fit(**fit).history["loss"]
    cuts = "first,inner,skip" if order == "interleaved" else "first"
    pipeline = Pipeline(2, order=order, cut_at=cuts)
    trainer = tfdist.Trainer(build, strategy=pipeline)
    before = trainer.predict(X, batch_size=7, verbose=0)  # before any training
    np.testing.assert_allclose(before, build().predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trainer.fit(**fit).history["loss"], losses, rtol=1e-5)
    assert_same_weights(trainer.model, plain)
    first = trainer.model.get_layer("first").variables
    stages = pipeline.variables.stages.weights()
    on_first = stages[0] + (stages[2] if len(stages) == 4 else [])
    optimizer = trainer.model.optimizer
    for variable in (v for v in optimizer.variables if len(v.shape)):
        in_first = any(v.path.replace("/", "_") in variable.path for v in on_first)
        assert variable.value.device[-5:] == ("CPU:0" if in_first else "CPU:1"), variable.path
    assert {v.value.device[-5:] for v in first} == {"CPU:0"}
    # Each micro-batch is traced separately, so that their order is defined.
    assert backward_passes == {
        (stage, number) for stage in range(pipeline.num_stages) for number in range(4)
    }


def build_tied() -> keras.Model:
    """Returns a language model whose first and last layers are the same, as are the others."""
    keras.utils.set_random_seed(1)
    inputs, table = keras.Input((3,), dtype="int32"), layers.ReversibleEmbedding(7, 4, name="table")
    dense = layers.Dense(4, "tanh", name="dense")
    outputs = table(dense(dense(table(inputs))), reverse=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, outputs), keras.optimizers.Adam(0.05, epsilon=1e-2), loss)


@pytest.mark.parametrize(("order", "remat"), [("interleaved", "all"), ("zb", "none")])
def test_stages_that_share_a_weight_match_one_device(order: str, remat: str) -> None:
    words = np.arange(33, dtype="int32").reshape(11, 3) % 7
    fit = {"x": words, "y": words[:, ::-1], "batch_size": 7, "shuffle": False, "verbose": 0}
    plain = build_tied()
    losses = plain.fit(**fit).history["loss"]
    pipeline = Pipeline(2, micro_batches=2, order=order)
    trainer = tfdist.Trainer(build_tied, strategy=pipeline, remat=remat)
    np.testing.assert_allclose(trainer.fit(**fit).history["loss"], losses, rtol=1e-5)
    assert_same_weights(trainer.model, plain)
    last = pipeline.num_stages - 1
    shared = trainer.describe()["shared weights"]
    assert shared.startswith(f"table/embeddings: stages 0, {last}")
    assert trainer.model.get_layer("table").embeddings.value.device.endswith("CPU:0")


def test_describe_lists_stages_and_bubble() -> None:
    described = Pipeline(2, micro_batches=6, order="1f1b").describe()
    assert described["stages"] == "2, split when the shapes of the data are known"
    assert described["micro-batches"] == "6, 1f1b; a stage keeps 2, 1"
    assert described["bubble"].startswith(
        "14% of the devices' time if stages cost the same: at most 1.71 "
    )
    trainer = tfdist.Trainer(build, strategy=Pipeline(2, cut_at=["first"]))
    assert trainer.describe()["stage 0"] == "first .. first: 30 parameters (24%), on CPU:0"


@pytest.mark.parametrize(
    ("order", "num_rows", "last"),
    [("gpipe", 1000, "kept_2"), ("1f1b", 1, "kept_2"), ("1f1b", 1000, "kept_1")],
)
def test_stages_by_memory(order: str, num_rows: int, last: str) -> None:
    def wide() -> keras.Model:
        """Returns a layer whose weights are as large as its activations for 64 rows."""
        hidden = inputs = keras.Input((64,))
        for number in range(6):
            hidden = layers.Dense(64, "tanh", name=f"kept_{number}")(hidden)
        outputs = layers.Dense(64, name="last")(hidden)
        return compiled(keras.Model(inputs, outputs), keras.optimizers.SGD(0.1, momentum=0.9))

    strategy = Pipeline(2, order=order, balance="memory", balance_rows=num_rows)
    described = tfdist.Trainer(wide, strategy=strategy).describe()
    # With 4 micro-batches, the first of two stages stores all (1f1b: two), the last one stores
    # one.
    assert described["stage 0"].startswith(f"kept_0 .. {last}: ")
    num = 3 if last == "kept_2" else 2
    # A weight, its gradient, its momentum and the sum of its gradients over micro-batches.
    weights, kept = 4 * 4 * (64 * 64 + 64), 4 * 64 * num_rows * (4 if order == "gpipe" else 2)
    assert f", {num * (weights + kept) / 1e6:,.1f} MB, on" in described["stage 0"]


def test_batch_with_fewer_rows_than_micro_batches_warns() -> None:
    with pytest.warns(UserWarning, match=r"number of micro-batches .* fewer micro_batch"):
        tfdist.Trainer(build, strategy=Pipeline(2)).fit(X, Y, batch_size=3)


def test_incompatible_options_raise() -> None:
    for wrong in ({"stages": 1}, {"micro_batches": 0}, {"stages": 3, "cut_at": "a"}):
        with pytest.raises(ConfigurationError, match=r"expected a number|leave stages out"):
            create("pipeline", **wrong)
    with pytest.raises(ConfigurationError, match="one device per stage, but got stages=3"):
        create("pipeline", 2, stages=3)
    for stages in (2, 3):
        with pytest.raises(ConfigurationError, match=r"several stages per device.* Use 4 stages"):
            create("pipeline", 2, order="interleaved", stages=stages)
    with pytest.raises(ConfigurationError, match="needs a multiple of 2 micro-batches"):
        create("pipeline", 2, order="interleaved", micro_batches=3)
    with pytest.raises(ConfigurationError, match="expected one of gpipe, 1f1b, interleaved, zb"):
        create("pipeline", 2, order="none")


def test_gpipe_runs_all_forward_passes_first() -> None:
    order = Order("gpipe", 2, 3)
    for micro_batch in range(3):
        before = order.before(Pass(0, micro_batch, "forward"))
        assert before == [f"F{micro_batch - 1}"] * bool(micro_batch)
        order.has_gone_forward(0, micro_batch, [f"F{micro_batch}"])
    assert order.before(Pass(0, 0, "backward")) == ["F2"]
    order.has_gone_back(0, 0, ["B0"])
    assert order.before(Pass(0, 1, "backward")) == ["B0"]


def test_1f1b_bounds_stored_micro_batches() -> None:
    order = Order("1f1b", 2, 4)
    for micro_batch in range(4):
        for stage in range(2):
            before = order.before(Pass(stage, micro_batch, "forward"))
            earlier = micro_batch - (2 - stage)
            assert [t for t in before if "B" in t] == [f"B{stage}{earlier}"] * (earlier >= 0)
            order.has_gone_forward(stage, micro_batch, [f"F{stage}{micro_batch}"])
        for stage in (1, 0):
            order.has_gone_back(stage, micro_batch, [f"B{stage}{micro_batch}"])


@pytest.mark.parametrize("exchange", [False, True])
def test_interleaved_order_holds_unless_passes_exchange_sums(exchange: bool) -> None:
    """A pass waits for one that is traced later; if that one waited for it, nothing would run."""

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        order = Order("interleaved", 2, 2, 1)
        gates = {pair: tf.ones([]) for pair in itertools.product(range(2), range(2))}
        for (number, stage), gate in gates.items():
            order.begins(Pass(stage, number, "forward"), gate)
            other = gates[1 - number, stage] if exchange else gate
            order.has_gone_forward(stage, number, [gate + other])
        order.connect()
        waiting = [pair for pair, gate in gates.items() if gate.op.control_inputs]
        assert waiting == ([] if exchange else [(0, 1), (1, 0), (1, 1)])
        return tf.add_n(list(gates.values()))

    assert float(step()) == 4.0


def test_gradients_of_weights_wait_for_later_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    n, m = 3, 7
    connect, checked = Order.connect, []

    def checking(order: Order) -> None:
        connect(order)
        ends = {own: {t.op for t in tensors} for own, tensors in order._ends.items()}
        if Pass(0, 0, "backward") not in ends:
            return
        graph = Dependencies(tf.compat.v1.get_default_graph())
        before = {own: graph.needed(last, set()) for own, last in ends.items()}
        for stage, i in itertools.product(range(1, n), range(m)):
            weights = Pass(stage, i, "weights")
            # No other stage waits for them, and neither does the stage's next backward pass.
            assert before[Pass(0, i, "backward")].isdisjoint(ends[weights])
            later = Pass(stage, min(i + stage, m - 1), "backward")
            assert before[weights] >= ends[later]
            if i + n + 1 < m:  # a bound for the memory
                assert before[Pass(stage, i + n + 1, "forward")] >= ends[weights]
        assert not any(own.kind == "weights" for own in ends if own.stage == 0)
        checked.append(order)

    monkeypatch.setattr(Order, "connect", checking)
    fit = {"x": X, "y": Y, "batch_size": 14, "shuffle": False, "verbose": 0}
    trainer = tfdist.Trainer(build, strategy=Pipeline(n, micro_batches=m, order="zb"))
    trainer.fit(**fit)
    plain = build()
    plain.fit(**fit)
    assert checked
    assert_same_weights(trainer.model, plain)


def test_split_backward_passes_follow_an_exchange_of_losses() -> None:
    """With a loss that sums over the micro-batches, all forward passes come first."""

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        order, ends = Order("zb", 2, 3), {}

        def traced(stage: int, number: int, kind: Kind, *inputs: tf.Tensor) -> None:
            own = Pass(stage, number, kind)
            with tf.control_dependencies(order.before(own) if kind != "weights" else []):
                gate = tf.add_n(inputs) if inputs else tf.random.uniform([])
            if kind != "weights":
                order.begins(own, gate)
            ends[own] = gate + 1.0
            if kind == "forward":
                order.has_gone_forward(stage, number, [ends[own]])
            else:
                order.has_gone_back(stage, number, [ends[own]], of_weights=kind == "weights")

        for number in range(3):
            traced(0, number, "forward")
            traced(1, number, "forward", ends[0, number, "forward"])
        loss = [ends[1, number, "forward"] for number in range(3)]
        for number in range(3):
            traced(1, number, "backward", *loss)
            traced(1, number, "weights", ends[1, number, "backward"])
            traced(0, number, "backward", ends[1, number, "backward"])
        order.connect()
        graph = Dependencies(tf.compat.v1.get_default_graph())
        for number in range(2):
            before = graph.needed([ends[1, number, "weights"].op], set())
            assert ends[1, number + 1, "backward"].op in before
        return tf.add_n(list(ends.values()))

    assert np.isfinite(step())
