"""Every recipe trains for two steps, and towers by hand match the strategy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.conformance.layouts import AnsweringPool, Layout, values_of
from tests.recipes import running
from tests.support.training import assert_close
from tfdist.config import TrainConfig
from tfdist.run import recipe
from tfdist.trainer import Trainer

#: `make check` trains these recipes on one device and the others on two replicas; `make long`
#: trains all of them on both, and under Horovod.
ON_ONE_DEVICE = {
    "cifar10_resnet", "gpt_text", "image_folder", "table", "text_classifier", "unet_segmentation",
    "vit_small", "xception_cats",
}  # fmt: skip


def combinations() -> Iterator[Any]:
    for name, strategy in itertools.product(recipe.names(), ["mirrored", "one_device"]):
        in_check = (strategy == "one_device") == (name in ON_ONE_DEVICE)
        yield pytest.param(name, strategy, marks=[] if in_check else [pytest.mark.long])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def pool(data_dir: str) -> Iterator[AnsweringPool]:
    with AnsweringPool(Layout("horovod", 2), running.create_training, data_dir) as pool:
        yield pool


@pytest.mark.parametrize(("name", "strategy"), combinations())
def test_two_steps(name: str, strategy: str, data_dir: str, tmp_path: Path) -> None:
    devices = {"one_device": 1, "mirrored": 2}[strategy]
    model = running.two_steps(name, strategy, devices, data_dir).model
    assert running.is_finite(model.history.history)
    model.save(tmp_path / "model.keras")
    keras.saving.load_model(tmp_path / "model.keras")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", recipe.names())
def test_two_steps_of_horovod(name: str, pool: AnsweringPool) -> None:
    first, other = values_of(pool.ask(name))
    assert running.is_finite(first)
    assert first == other


def test_towers_by_hand_match_mirrored() -> None:
    from recipes import towers_by_hand

    config = TrainConfig(**{**towers_by_hand.DEFAULTS, "batch_size": 7})
    batches = list(towers_by_hand.train_data(config).take(3))

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        return towers_by_hand.build_model(config, 3)

    by_hand = build()
    by_hand.optimizer.build(by_hand.trainable_variables)
    step = towers_by_hand.tower_step(by_hand, ["CPU:0", "CPU:1"])
    for images, labels in batches:
        step(images, labels)
    trainer = Trainer(build, "mirrored", devices=2)
    for images, labels in batches:
        trainer.fit(images, labels, batch_size=7, verbose=0)
    assert_close(trainer.model.get_weights(), by_hand.get_weights())
