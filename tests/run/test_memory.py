"""A warning before training if it cannot fit into memory."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist import strategies
from tfdist.config import TrainConfig
from tfdist.run import memory


@pytest.fixture(scope="module")
def model() -> keras.Model:
    inputs = keras.Input((10,))
    inner = keras.Sequential([keras.Input((100,)), keras.layers.Dense(50)])
    x = inner(keras.layers.ReLU()(keras.layers.Dense(100)(inputs)))
    return keras.Model(inputs, x)


SPEC = (tf.TensorSpec((None, 10)), tf.TensorSpec((None, 50)))
#: Bytes: gradients and two slots of Adam; of a row what the second layer reads, and the outputs.
STATE, ROW = 3 * 4 * (11 * 100 + 101 * 50), 4 * (100 + 50)


@pytest.mark.parametrize(
    ("missing", "fields"), [(1, {}), (0, {}), (0, {"accumulate": 2}), (0, {"remat": "all"})]
)
def test_warns_only_if_training_cannot_fit(
    missing: int, fields: dict[str, Any], model: keras.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(batch_size=1000, **fields)
    num_bytes = STATE + 1000 * ROW - missing
    monkeypatch.setattr(
        memory.psutil, "virtual_memory", lambda: type("", (), {"available": num_bytes})
    )
    monkeypatch.setattr(memory, "_CGROUP", memory.Path("/no/such/folder"))
    warning = memory.shortage(config, model, strategies.create("one_device"), SPEC)
    assert bool(warning) == bool(missing)
    if missing:
        assert "at least 674 kB more memory (73.8 kB for gradients" in warning
        assert "--accumulate 2" in warning


def test_container_and_flag_limit_the_memory(
    model: keras.Model, tmp_path: memory.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    strategy = strategies.create("one_device")
    assert not memory.shortage(TrainConfig(), model, strategy, SPEC)
    assert memory.shortage(TrainConfig(memory=1, batch_size=9999), model, strategy, SPEC)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert "1 kB are available" in memory.shortage(TrainConfig(), model, strategy, SPEC)


class Inside(keras.layers.Layer):
    """A layer that contains a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(16)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)


@pytest.mark.parametrize(("in_scope", "num_tensors"), [(False, 2), (True, 1)])
def test_layers_within_layers_and_sequences_of_any_length(
    in_scope: bool, num_tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts both dense layers, or the output of the model that is recomputed."""
    tokens, inner = keras.Input((None, 16)), keras.Input((None, 16))
    block = [Inside(), Inside()]
    with keras.RematScope("full" if in_scope else None):
        whole = keras.Model(inner, block[1](block[0](inner)))
    model = keras.Model(tokens, whole(tokens))
    state = 3 * 4 * 2 * 17 * 16
    monkeypatch.setattr(
        memory.psutil, "virtual_memory", lambda: type("", (), {"available": state + 1})
    )
    spec = (tf.TensorSpec((None, 7, 16)), tf.TensorSpec((None, 7, 16)))
    strategy = strategies.create("one_device")
    warning = memory.shortage(TrainConfig(batch_size=1000), model, strategy, spec)
    assert f"--accumulate {num_tensors * 7 * 16 * 4 * 1000} or more" in warning
    assert f"{num_tensors * 7 * 16 * 4} kB for activations of 1000 rows" in warning
