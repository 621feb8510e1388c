"""Sizes, shapes and precision of the shared models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state

from tfdist import models
from tfdist.errors import ConfigurationError
from tfdist.trainer import Trainer

#: Options that make each image classifier small, and its minimum image size.
SMALL: dict[str, tuple[dict[str, Any], int]] = {
    "cnn": ({"batch_norm": True, "dropout": 0.1}, 8),
    "mlp": ({"dropout": 0.1}, 8),
    "alexnet": ({"width": 0.05, "columns": 2}, 67),
    "vgg16": ({}, 32),
    "resnet18": ({"width": 4}, 8),
    "resnet50": ({"zero_gamma": True}, 32),
    "densenet169": ({}, 32),
    "xception": ({}, 71),
    "vit": ({"size": "micro", "patch": 4, "dropout": 0.1}, 8),
    "keras_application": ({"application": "MobileNetV2", "dropout": 0.1}, 32),
}


@pytest.fixture
def without_initialization() -> Iterator[None]:
    """Weights have shapes inside this context, but use no memory."""
    with keras.StatelessScope(initialize_variables=False):
        yield
    global_state.set_global_attribute("uninitialized_variables", [])  # leaves them uninitialized


@pytest.mark.usefixtures("without_initialization")
@pytest.mark.parametrize("name", models.IMAGE_CLASSIFIERS)
def test_image_classifiers_have_the_requested_shapes(name: str) -> None:
    options, size = SMALL[name]
    for shape, num_classes in [((size, size, 3), 10), ((size + 4, size + 8, 1), 3)]:
        model = models.image_classifier(name, shape, num_classes, options, scale=1 / 255)
        assert model.name == name
        assert model.input_shape == (None, *shape)
        assert model.output_shape == (None, num_classes)
        assert isinstance(model.layers[1], keras.layers.Rescaling)
        assert not model.compiled


@pytest.mark.usefixtures("without_initialization")
@pytest.mark.parametrize("name", models.IMAGE_CLASSIFIERS)
def test_models_of_different_precision(name: str) -> None:
    before = keras.config.dtype_policy()
    options, size = SMALL[name]
    builder, formats = getattr(models, name), {}
    for policy in ("mixed_bfloat16", "bfloat16", None):
        model = builder((size, size, 3), 10, dtype_policy=policy, scale=1 / 255, **options)
        inner = [layer for layer in model.layers if layer.weights][:-1]
        (kinds,) = {(layer.compute_dtype, layer.variable_dtype) for layer in inner}
        formats[policy] = (*kinds, model.output.dtype)
    assert formats == {
        "mixed_bfloat16": ("bfloat16", "float32", "float32"),
        "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
        None: ("float32", "float32", "float32"),
    }
    assert keras.config.dtype_policy() is before


@pytest.mark.usefixtures("without_initialization")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_other_models_have_the_requested_precision(policy: str) -> None:
    last = "float32" if policy.startswith("mixed_") else policy
    autoencoder = models.autoencoder((16, 24, 3), filters=(4, 8), dtype_policy=policy)
    unet = models.unet((16, 24, 3), 2, filters=2, depth=3, batch_norm=True, dtype_policy=policy)
    gpt = models.gpt(11, 8, size="tiny", dtype_policy=policy)
    lstm = models.lstm(11, 3, width=4, units=2, mask_zero=True, dtype_policy=policy)
    shapes = [(16, 24, 3), (16, 24, 2), (None, 11), (3,)]
    for model, shape in zip([autoencoder, unet, gpt, lstm], shapes, strict=True):
        assert (model.output_shape, model.output.dtype) == ((None, *shape), last)
        parts = [x.layers if isinstance(x, keras.Model) else [x] for x in model.layers[1:-1]]
        inner = [layer for layers in parts for layer in layers if layer.weights]
        assert {layer.compute_dtype for layer in inner} == {"bfloat16"}


def test_logits_follow_the_global_policy() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = models.mlp((4,), 2)
    finally:
        keras.config.set_dtype_policy(before)
    assert model.layers[-2].compute_dtype == "float16"
    assert model.layers[-1].compute_dtype == "float32"


IMAGENET = ((224, 224, 3), 1000)

#: The builder, its arguments, the number of weights, and where that was published. Keras counts the
#: moments of BatchNorm among them, two a channel; figures without are of the trainable ones.
PUBLISHED: list[tuple[str, tuple[Any, ...], dict[str, Any], int, str]] = [
    ("alexnet", ((227, 227, 3), 1000), {}, 62_378_344, "the usual AlexNet of one column"),
    ("alexnet", ((227, 227, 3), 1000), {"columns": 2}, 60_965_224, "the paper's '60 million'"),
    ("vgg16", IMAGENET, {}, 138_357_544, "the paper's 138 million; keras.applications, with top"),
    ("resnet50", IMAGENET, {}, 25_636_712, "keras.applications, with top"),
    ("densenet169", IMAGENET, {}, 14_307_880, "keras.applications, with top"),
    ("xception", ((299, 299, 3), 1000), {}, 22_910_480, "keras.applications, with top"),
    # torchvision's 11,689,512, and the moments of 4,800 channels.
    ("resnet18", IMAGENET, {"stem": "large"}, 11_689_512 + 2 * 4800, "torchvision"),
    ("resnet18", ((32, 32, 3), 10), {}, 11_183_562, "11 million"),
    ("cnn", ((8, 8, 1), 10), {}, 119_370, "by hand"),
    ("autoencoder", ((28, 28, 1),), {}, 28_353, "keras.io/examples/vision/autoencoder"),
    ("lstm", (20_000, 1), {}, 2_757_761, "keras.io/examples/nlp/bidirectional_lstm_imdb"),
    # Table 2 there says 117 and 345 million, which its authors corrected to these.
    ("gpt", (50_257, 1024), {}, 124_439_808, "GPT-2 as released, small"),
    ("gpt", (50_257, 1024), {"size": "medium"}, 354_823_168, "GPT-2 as released, medium"),
    # As in timm without the class token, its position and the bias of the patches, which the
    # positions contain.
    ("vit", IMAGENET, {"size": "tiny"}, 5_717_416 - 3 * 192, "timm, DeiT-Ti"),
    ("vit", IMAGENET, {}, 22_050_664 - 3 * 384, "timm, DeiT-S"),
    ("vit", IMAGENET, {"size": "base"}, 86_567_656 - 3 * 768, "timm, ViT-B/16"),
]


@pytest.mark.usefixtures("without_initialization")
@pytest.mark.parametrize(("name", "arguments", "options", "number", "source"), PUBLISHED)
def test_published_sizes(
    name: str, arguments: Sequence[Any], options: dict[str, Any], number: int, source: str
) -> None:
    model = getattr(models, name)(*arguments, **options)
    assert model.count_params() == number, source


@pytest.mark.usefixtures("without_initialization")
def test_sizes_match_rounded_published_ones() -> None:
    """Papers that give two or three digits."""
    # Zhou et al. 2018, "UNet++", table 3: a U-Net of 32 to 512 channels has 7.76 million.
    assert round(models.unet((96, 96, 3), 1, filters=32).count_params() / 1e6, 2) == 7.76
    # He et al. 2016, table 6: ResNet-20 has 0.27, ResNet-56 0.85 million.
    for blocks, millions in [(3, 0.27), (9, 0.86)]:  # theirs has no projections: 2,560 fewer
        model = models.resnet18((32, 32, 3), 10, width=16, num_blocks=(blocks,) * 3)
        number = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
        assert round(number / 1e6, 2) == millions
        assert round((number - 2560 - 192) / 1e6, 2) == min(millions, 0.85)


def test_resnet18_convolutions() -> None:
    model = models.resnet18((8, 8, 3), 10, width=4)
    kernels = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    # 17 convolutions in a row and three projections; with the logits 18 layers deep.
    assert len(kernels) == 20


def test_zero_initialized_blocks_are_the_identity() -> None:
    for zero_gamma in (False, True):
        model = models.resnet18((8, 8, 3), 10, width=4, num_blocks=(2, 2), zero_gamma=zero_gamma)
        norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
        is_zero = [not np.any(norm.gamma) for norm in norms]
        assert (len(norms), sum(is_zero)) == (10, 4 * zero_gamma)
    gammas = {x.name: x.gamma for x in models.resnet50((32, 32, 3), 10, zero_gamma=True).layers
              if x.name.endswith("_bn")}  # fmt: skip
    assert {name for name, gamma in gammas.items() if not np.any(gamma)} == {
        f"conv{stage}_block{block}_3_bn"
        for stage, blocks in [(2, 3), (3, 4), (4, 6), (5, 3)]
        for block in range(1, blocks + 1)
    }


def test_alexnet_columns_merge_in_the_third_convolution() -> None:
    keras.utils.set_random_seed(0)
    model = models.alexnet((67, 67, 3), 10, columns=2, width=0.05)
    convolutions = [x for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    seen = [layer.kernel.shape[2] for layer in convolutions]
    created = [layer.filters for layer in convolutions]
    assert created == [2, 2, 6, 6, 9, 9, 9, 9, 6, 6]
    assert seen == [3, 3, 2, 2, 12, 12, 9, 9, 9, 9]
    with pytest.raises(ConfigurationError, match="expected 1 or 2 columns, got 3"):
        models.alexnet((67, 67, 3), 10, columns=3)


def test_normalisation_of_alexnet() -> None:
    from tfdist.models.builders.cnn import _local_response_norm

    inputs = keras.Input((3, 3, 7))
    model = keras.Model(inputs, _local_response_norm(inputs))
    x = 30 * np.random.default_rng(0).normal(size=(2, 3, 3, 7)).astype("float32")
    wanted = tf.nn.local_response_normalization(x, 2, bias=2.0, alpha=1e-4, beta=0.75)
    np.testing.assert_allclose(model(x), wanted, rtol=1e-5)


def test_gpt_is_causal() -> None:
    model = models.gpt(11, 8, size="tiny")
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8))
    later = np.concatenate([tokens[:, :5], tokens[:, 5:] + 1], 1) % 11
    plain = model(tokens)
    np.testing.assert_allclose(plain[:, :5], model(later)[:, :5], atol=1e-6)
    assert np.abs(plain[:, 5:] - model(later)[:, 5:]).max() > 1e-3
    np.testing.assert_allclose(model(tokens[:, :5]), plain[:, :5], atol=1e-6)


def test_gpt_with_remat_drops_the_same_values() -> None:
    tokens = np.random.default_rng(0).integers(0, 11, (4, 8))
    weights = []
    for remat in (False, True):
        keras.utils.set_random_seed(0)
        trainer = Trainer(lambda remat=remat: gpt_that_drops(remat), "one_device")
        trainer.fit(tokens, np.roll(tokens, -1, 1), batch_size=4, epochs=2, verbose=0)
        weights.append(trainer.model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def gpt_that_drops(remat: bool) -> keras.Model:
    model = models.gpt(11, 8, size="tiny", dropout=0.3, remat=remat)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("alexnet", ((67, 67, 3), 2), {"width": 0.05, "columns": 2}),
        ("gpt", (11, 8), {"size": "tiny", "remat": True}),
        ("vit", ((8, 8, 1), 2), {"size": "micro", "patch": 4}),
    ],
)
def test_saved_models_load_in_plain_keras(
    name: str, arguments: Sequence[Any], options: dict[str, Any], tmp_path: Path
) -> None:
    model = getattr(models, name)(*arguments, **options)
    model.save(tmp_path / "model.keras")
    assert b"tfdist" not in (tmp_path / "model.keras").read_bytes()
    again = keras.saving.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(0).integers(0, 11, (2, *(s or 8 for s in model.input_shape[1:])))
    np.testing.assert_allclose(again(x), model(x), atol=1e-6)


def test_other_builders_are_not_image_classifiers() -> None:
    with pytest.raises(ConfigurationError, match="--model gpt: expected one that classifies im"):
        models.image_classifier("gpt", (8, 8, 1), 10)
    assert set(models.options("mlp")) == {"units", "dropout"}
    assert set(models.IMAGE_CLASSIFIERS) == set(SMALL)
