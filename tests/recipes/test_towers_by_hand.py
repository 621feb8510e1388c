"""The recipe whose towers are written by hand."""

from __future__ import annotations

import keras

from tests.support.training import assert_close
from tfdist.config import TrainConfig
from tfdist.trainer import Trainer


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
