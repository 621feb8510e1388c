"""What a strategy puts on the device of a replica has a GPU kernel.

TensorFlow places an operation without one on the host, silently: its inputs and outputs then cross
from GPU to host and back in every step.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.gpu_paths import kernel_coverage
from tests.gpu_paths.kernel_coverage import without_kernel
from tfdist import strategies

#: The strategies with their options, by name. Not included: `multi_worker` and `horovod`, which
#: are `mirrored` and `one_device` with collectives, for which TensorFlow and Horovod have kernels
#: by dtype, and parameter servers, whose workers have graphs of `one_device`.
STRATEGIES: dict[str, dict[str, Any]] = {
    "one_device": {},
    "mirrored": {},
    "mirrored, hierarchical copy": {"all_reduce": "hierarchical_copy"},
    "mirrored, shared trace": {"one_trace_from": 0},
    "central_storage": {},
    "towers": {},
    "pipeline": {},
    "tensor_parallel": {"smallest": 1},
    "sharded optimizer": {"shard": "optimizer", "smallest": 1},
    "sharded gradients": {"shard": "gradients", "smallest": 1},
    "sharded parameters": {"shard": "parameters", "smallest": 1},
}


def build_images() -> keras.Model:
    """Returns a network of images: convolutions, BatchNorm, Dropout, labels of integers."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3),
            layers.MaxPooling2D(),
            layers.Dropout(0.1),
            layers.Flatten(),
            layers.Dense(5, dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
    )
    return model


def build_text() -> keras.Model:
    """Returns a network of token sequences: Embedding with a mask, attention, LSTM."""
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    model = keras.Model(tokens, layers.Dense(5, "softmax")(layers.LSTM(4)(x)))
    model.compile(
        keras.optimizers.AdamW(0.01, global_clipnorm=1.0, use_ema=True),
        "sparse_categorical_crossentropy",
        weighted_metrics=["accuracy"],
    )
    return model


def build_table() -> keras.Model:
    """Returns a network of numbers: Keras's own accumulation, metrics that count, random noise."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Normalization(mean=0.0, variance=1.0),
            layers.Dense(8, "gelu"),
            layers.GaussianNoise(0.1),
            layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        "binary_crossentropy",
        metrics=["mae", keras.metrics.AUC(), keras.metrics.Precision()],
    )
    return model


_RNG = np.random.default_rng(0)
_NUM_ROWS, _BATCH_SIZE = 20, 8
MODELS: dict[str, Any] = {
    "images": (
        build_images,
        _RNG.random((_NUM_ROWS, 8, 8, 3), dtype="float32"),
        _RNG.integers(0, 5, _NUM_ROWS),
    ),
    "text": (
        build_text,
        _RNG.integers(0, 20, (_NUM_ROWS, 6)).astype("int32"),
        _RNG.integers(0, 5, _NUM_ROWS),
    ),
    "table": (
        build_table,
        _RNG.random((_NUM_ROWS, 4), dtype="float32"),
        _RNG.integers(0, 2, (_NUM_ROWS, 1)).astype("float32"),
    ),
}

#: Options of the Trainer, by name.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16, accumulated": {"precision": "mixed_float16", "accumulate": 2},
    "bfloat16, synchronized BatchNorm": {"precision": "mixed_bfloat16", "sync_batch_norm": True},
}

#: What `make test` runs; the rest is long.
_QUICK = {
    ("mirrored, hierarchical copy", "images", "plain"),
    ("pipeline", "images", "plain"),
    ("sharded parameters", "table", "float16, accumulated"),
}


def _cases() -> list[Any]:
    cases = [
        (strategy, model, options)
        for strategy in STRATEGIES
        for model in MODELS
        for options in OPTIONS
        if not ("BatchNorm" in options and (model != "images" or strategy == "one_device"))
    ]
    assert set(cases) >= _QUICK
    return [
        pytest.param(*case, marks=[] if case in _QUICK else [pytest.mark.long]) for case in cases
    ]


@pytest.mark.parametrize(("strategy", "model", "options"), _cases())
def test_every_operation_of_a_replica_has_a_gpu_kernel(
    strategy: str, model: str, options: str
) -> None:
    keras.utils.set_random_seed(1)
    build, x, y = MODELS[model]
    devices = ["CPU:1"] if strategy == "one_device" else ["CPU:1", "CPU:2"]
    name = strategy.partition(",")[0].partition(" ")[0]

    def run() -> None:
        made = strategies.create(name, devices, **STRATEGIES[strategy])
        trainer = tfdist.Trainer(build, strategy=made, **OPTIONS[options])
        trainer.fit(x, y, batch_size=_BATCH_SIZE, verbose=0)
        trainer.evaluate(x, y, batch_size=_BATCH_SIZE, verbose=0)
        trainer.predict(x, batch_size=_BATCH_SIZE, verbose=0)

    result = without_kernel(run)
    assert devices[0] in result
    assert not any(result.values()), result


def test_operation_without_a_kernel_is_found() -> None:
    @tf.function
    def compute(numbers: tf.Tensor, names: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.device("CPU:1"):
            return tf.matmul(numbers, numbers), tf.strings.length(names), names == names

    numbers, names = tf.ones((2, 2)), tf.constant(["a", "b"])
    assert without_kernel(lambda: compute(numbers, names)) == {
        "CPU:1": ["Equal(T=string)", "StringLength()"]
    }


def test_kernel_for_another_dtype_does_not_count() -> None:
    @tf.function
    def compute(numbers: tf.Tensor) -> list[tf.Tensor]:
        with tf.device("CPU:2"):
            return tf.split(numbers, [1, 3])

    assert without_kernel(lambda: compute(tf.ones(4))) == {"CPU:2": []}
    result = without_kernel(lambda: compute(tf.ones(4, tf.uint8)))
    assert result == {"CPU:2": ["SplitV(T=uint8, Tlen=int32)"]}


def test_allowed_operations_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    @tf.function
    def compute(names: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:1"):
            return tf.strings.length(names)

    monkeypatch.setitem(kernel_coverage.ALLOWED, "StringLength()", "a reason")
    assert without_kernel(lambda: compute(tf.constant(["a"]))) == {"CPU:1": []}
