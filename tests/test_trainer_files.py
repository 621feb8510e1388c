"""Unmodified Keras callbacks that write files write with the trainer what they write with Keras."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import callbacks as kc
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.training import (
    FIT,
    VALIDATED,
    assert_close,
    assert_same_weights,
    build,
    fresh_pair,
    mirrored,
    steps,
)


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_model_checkpoint_saves_the_best_epoch_of_keras(suffix: str, tmp_path: Path) -> None:
    def saver(folder: str) -> kc.Callback:
        return kc.ModelCheckpoint(
            tmp_path / folder / ("best" + suffix),
            save_best_only=True,
            save_weights_only=suffix != ".keras",
        )

    def saved(folder: str) -> keras.Model:
        path = tmp_path / folder / ("best" + suffix)
        if suffix == ".keras":
            return keras.saving.load_model(path)
        model = build()
        model.load_weights(path)
        return model

    trainer, plain = fresh_pair()
    trainer.fit(**VALIDATED, callbacks=[saver("ours")])
    plain.fit(**VALIDATED, callbacks=[saver("theirs")])
    assert_same_weights(saved("ours"), saved("theirs"))


def test_checkpoints_between_epochs(tmp_path: Path) -> None:
    def saver(folder: str) -> kc.Callback:
        path = tmp_path / folder / "{epoch}-{batch}.weights.h5"
        return kc.ModelCheckpoint(path, save_freq=2, save_weights_only=True)

    trainer, plain = fresh_pair()
    trainer.fit(**FIT, epochs=2, callbacks=[saver("ours")])
    plain.fit(**FIT, epochs=2, callbacks=[saver("theirs")])
    found, wanted = (sorted((tmp_path / folder).iterdir()) for folder in ("ours", "theirs"))
    assert [path.name for path in found] == [path.name for path in wanted]
    assert len(wanted) == 3
    for path, other in zip(found, wanted, strict=True):
        ours, theirs = build(), build()
        ours.load_weights(path)
        theirs.load_weights(other)
        assert_same_weights(ours, theirs)


@pytest.mark.parametrize("update_freq", ["epoch", 2])
def test_tensorboard(update_freq: str | int, tmp_path: Path) -> None:
    def scalars(runner: Any, folder: str) -> dict[str, Any]:
        board = kc.TensorBoard(tmp_path / folder, histogram_freq=1, update_freq=update_freq)
        runner.fit(**VALIDATED, callbacks=[board])
        found = {}
        for part in ("train", "validation"):
            events = EventAccumulator(str(tmp_path / folder / part)).Reload()
            for tag in events.Tags()["tensors"]:
                if tag.startswith(("epoch_loss", "batch_loss", "evaluation", "epoch_learning")):
                    found[f"{part} {tag}"] = [
                        (event.step, tf.make_ndarray(event.tensor_proto))
                        for event in events.Tensors(tag)
                    ]
        return found

    trainer, plain = fresh_pair()
    found, wanted = scalars(trainer, "ours"), scalars(plain, "theirs")
    assert "train epoch_loss" in wanted
    assert_close(found, wanted)


def test_csv_logger(tmp_path: Path) -> None:
    def rows(runner: Any, name: str) -> list[dict[str, float]]:
        runner.fit(**VALIDATED, callbacks=[kc.CSVLogger(tmp_path / name)])
        with (tmp_path / name).open() as file:
            return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]

    trainer, plain = fresh_pair()
    assert_close(rows(trainer, "ours"), rows(plain, "theirs"))


def test_interrupted_training_resumes(tmp_path: Path) -> None:
    class Interrupt(kc.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if steps(self.model) == 7:
                raise KeyboardInterrupt

    def momentum() -> keras.Model:
        return build(keras.optimizers.SGD(0.1, momentum=0.9))

    with pytest.raises(KeyboardInterrupt):
        mirrored(momentum).fit(
            **VALIDATED, callbacks=[kc.BackupAndRestore(tmp_path / "backup"), Interrupt()]
        )
    resumed, plain = mirrored(momentum), momentum()
    resumed.fit(**VALIDATED, callbacks=[kc.BackupAndRestore(tmp_path / "backup")])
    plain.fit(**VALIDATED)
    assert resumed.model.history.epoch == [2, 3]
    assert_close(resumed.model.history.history["loss"], plain.history.history["loss"][2:])
    assert_same_weights(resumed.model, plain)
