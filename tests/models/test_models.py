"""Sizes, shapes and precision of the shared models."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

from tfdist import models

BUILDERS = [
    pytest.param(models.mlp, {}, id="mlp"),
    pytest.param(models.cnn, {"batch_norm": True, "dropout": 0.1, "scale": 1 / 255}, id="cnn"),
    pytest.param(models.resnet18, {"width": 4}, id="resnet18"),
]


@pytest.mark.parametrize(("build", "options"), BUILDERS)
def test_logits_of_any_shape(build: Callable[..., keras.Model], options: dict[str, object]) -> None:
    for shape, num_classes in [((8, 8, 1), 10), ((12, 20, 3), 3)]:
        model = build(shape, num_classes, **options)
        images = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
        assert model(images).shape == (2, num_classes)
        assert not model.compiled


@pytest.mark.parametrize(("build", "options"), BUILDERS)
def test_precisions_beside_each_other(
    build: Callable[..., keras.Model], options: dict[str, object]
) -> None:
    before = keras.config.dtype_policy()
    formats = {}
    for policy in ("mixed_bfloat16", "bfloat16", "float32", None):
        model = build((8, 8, 1), 10, dtype_policy=policy, **options)
        inner = model.layers[-2]
        output = model(np.zeros((1, 8, 8, 1), np.uint8)).dtype.name
        formats[policy] = (inner.compute_dtype, inner.variable_dtype, output)
    assert formats == {
        "mixed_bfloat16": ("bfloat16", "float32", "float32"),
        "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
        "float32": ("float32", "float32", "float32"),
        None: ("float32", "float32", "float32"),
    }
    assert keras.config.dtype_policy() is before


def test_logits_follow_the_global_policy() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = models.mlp((4,), 2)
    finally:
        keras.config.set_dtype_policy(before)
    assert model.layers[-2].compute_dtype == "float16"
    assert model.layers[-1].compute_dtype == "float32"


def test_sizes() -> None:
    assert models.cnn((8, 8, 1), 10).count_params() == 119_370
    assert models.resnet18((32, 32, 3), 10).count_params() == 11_183_562


def test_the_convolutions_of_resnet18() -> None:
    model = models.resnet18((8, 8, 3), 10, width=4)
    kernels = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    # 17 convolutions in a row and three projections; with the logits 18 layers deep.
    assert len(kernels) == 20
