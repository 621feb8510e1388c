"""Random Keras layers draw from the seed of an example, also in parallel maps."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipelines.maps.layers import seeded

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3)).astype(np.uint8)
LAYERS = [
    keras.layers.RandAugment(),
    keras.layers.RandomRotation(0.3),
    keras.layers.RandomColorJitter(value_range=(0, 255), brightness_factor=0.4, hue_factor=0.2),
]
if hasattr(keras.layers, "RandomErasing"):
    LAYERS.append(keras.layers.RandomErasing(factor=1.0, scale=(0.1, 0.3)))


def drawn(layer: keras.layers.Layer, order: list[int]) -> dict[int, bytes]:
    """Returns the results of a layer in a parallel map over images in some order."""
    augment = seeded(layer)
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES[order], order))
    dataset = dataset.map(lambda image, i: (augment(image, tf.stack([i, 9])), i), 4)
    return {int(i): image.tobytes() for image, i in dataset.as_numpy_iterator()}


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_random_numbers_depend_only_on_the_seed(layer: keras.layers.Layer) -> None:
    first = drawn(layer, [0, 1, 2, 3, 4, 5])
    assert first == drawn(layer, [5, 3, 1, 0, 2, 4])
    assert any(first[i] != IMAGES[i].tobytes() for i in first)


def test_layer_is_not_changed() -> None:
    layer = keras.layers.RandomRotation(0.3)
    generator = layer.generator
    drawn(layer, [0])
    assert layer.generator is generator
    assert layer(IMAGES.astype(np.float32), training=True).shape == IMAGES.shape


def test_mask_is_transformed_like_its_image() -> None:
    """The mask is the image's first channel before and after, without blended classes."""
    image = np.repeat((IMAGES[0, ..., :1] > 128) * np.uint8(200), 3, -1)
    pair = {"images": image, "segmentation_masks": image[..., :1].astype(np.int32)}
    for layer in [keras.layers.RandomFlip(), keras.layers.RandomTranslation(0.4, 0.4)]:
        augment = seeded(layer)
        moved = False
        for i in range(8):
            after = augment(pair, tf.constant([i, 1]))
            assert set(np.unique(after["segmentation_masks"])) <= {0, 200}
            sure = np.isin(after["images"][..., :1], [0, 200])
            np.testing.assert_array_equal(
                after["images"].numpy()[..., :1][sure], after["segmentation_masks"].numpy()[sure]
            )
            moved |= (after["segmentation_masks"].numpy() != pair["segmentation_masks"]).any()
        assert moved


@pytest.mark.parametrize("layer", [keras.layers.MixUp(), keras.layers.CutMix()])
def test_labels_are_mixed_like_images(layer: keras.layers.Layer) -> None:
    labels = np.eye(6, dtype=np.float32)
    batch = {"images": IMAGES, "labels": labels}
    first, again, other = (seeded(layer)(batch, tf.constant([i, 1])) for i in (1, 1, 2))
    assert first["images"].dtype == tf.uint8
    np.testing.assert_array_equal(first["images"], again["images"])
    np.testing.assert_allclose(tf.reduce_sum(first["labels"], -1), np.ones(6), rtol=1e-5)
    assert (first["labels"].numpy() != other["labels"].numpy()).any()


def test_layer_without_seeds_raises() -> None:
    with pytest.raises(ValueError, match="AugMix cannot be seeded"):
        seeded(keras.layers.AugMix())
