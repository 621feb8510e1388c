"""The default recipe: its data, its model, and two steps of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from recipes import digits
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run import recipe


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = str(tmp_path_factory.mktemp("data"))
    return TrainConfig(**{**digits.DEFAULTS, "data_dir": folder})


def images_and_labels(dataset: tf.data.Dataset) -> tuple[np.ndarray, np.ndarray]:
    batches = list(dataset.as_numpy_iterator())
    return np.concatenate([b[0] for b in batches]), np.concatenate([b[1] for b in batches])


def test_every_digit_is_in_one_split(config: TrainConfig) -> None:
    from sklearn.datasets import load_digits

    parts = [digits.train_data(config), digits.validation_data(config)]
    assert [part.cardinality().numpy() for part in parts] == [23, 6]
    (train, train_labels), (held_out, held_out_labels) = map(images_and_labels, parts)
    assert (len(train), len(held_out)) == (1437, 360)
    assert train.dtype == np.uint8
    pixels, labels = load_digits(return_X_y=True)
    expected = sorted((*x.astype(int), y) for x, y in zip(pixels, labels, strict=True))
    both = np.concatenate([train, held_out]).reshape(-1, 64).astype(int)
    both_labels = np.concatenate([train_labels, held_out_labels])
    assert sorted((*x, y) for x, y in zip(both, both_labels, strict=True)) == expected
    # Stratified: the classes' counts differ by as little as the whole set's do.
    assert np.ptp(np.bincount(held_out_labels)) <= 3


def test_seed_orders_the_data(config: TrainConfig) -> None:
    def labels(seed: int) -> list[int]:
        data = digits.train_data(config.model_copy(update={"seed": seed}))
        return images_and_labels(data)[1].tolist()

    assert labels(1) == labels(1) != labels(2)


def test_index_has_the_label_names(config: TrainConfig) -> None:
    import pipelines

    digits.validation_data(config)
    index = pipelines.load_index(Path(config.data_dir) / "digits" / "validation")
    assert index.features[1].label_names == tuple("0123456789")


def test_two_steps(config: TrainConfig) -> None:
    keras.utils.set_random_seed(0)
    data = digits.train_data(config)
    model = digits.build_model(config, recipe.num_steps(data))
    history = model.fit(data.take(2), verbose=0)
    assert np.isfinite(history.history["loss"][0])
    assert model.optimizer.iterations == 2
    assert model.count_params() == 119_370


def test_learning_rate_warms_up_for_half_an_epoch(config: TrainConfig) -> None:
    rate = digits.build_model(config, 23).optimizer.get_config()["learning_rate"]["config"]
    assert rate["warmup_steps"] == 12
    assert rate["warmup_steps"] + rate["decay_steps"] == 20 * 23


def test_model_can_be_selected(config: TrainConfig) -> None:
    def built(**update: object) -> keras.Model:
        return digits.build_model(config.model_copy(update=update), 23)

    rates = {x.rate for x in built().layers if isinstance(x, keras.layers.Dropout)}
    assert rates == {0.2}
    other = built(model="resnet18", set={"width": 4, "num_blocks": [1]})
    assert (other.name, other.count_params()) == ("resnet18", 422)
    with pytest.raises(ConfigurationError, match="--model gpt: expected one that classifies"):
        built(model="gpt")


def test_model_needs_no_data(tmp_path: Path) -> None:
    config = TrainConfig(**{**digits.DEFAULTS, "data_dir": str(tmp_path)})
    digits.build_model(config, 23)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [{"label_smoothing": 0.1}, {"set": {"mixup": 0.4}}])
def test_smoothed_and_mixed_labels_are_one_hot(
    config: TrainConfig, changes: dict[str, Any]
) -> None:
    config = config.model_copy(update=changes)
    data = digits.train_data(config)
    model = digits.build_model(config, recipe.num_steps(data))
    assert model.loss.get_config()["label_smoothing"] == config.label_smoothing
    history = model.fit(data.take(2), validation_data=digits.validation_data(config), verbose=0)
    assert 0 <= history.history["val_accuracy"][0] <= 1
    labels = next(iter(data))[1].numpy()
    np.testing.assert_allclose(labels.sum(-1), 1, rtol=1e-5)
    assert (labels.max(-1) < 1).any() == ("set" in changes)
