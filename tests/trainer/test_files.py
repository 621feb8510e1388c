"""Unmodified Keras callbacks that write files write with the trainer what they write with Keras."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
    momentum,
    steps,
)
from tfdist.errors import ConfigurationError
from tfdist.loops.model_methods import write_on_chief_only


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_model_checkpoint_saves_the_best_epoch_of_keras(suffix: str, tmp_path: Path) -> None:
    saved = []
    for runner in fresh_pair():
        path = tmp_path / f"{len(saved)}{suffix}"
        only_weights = suffix != ".keras"
        saver = kc.ModelCheckpoint(path, save_best_only=True, save_weights_only=only_weights)
        runner.fit(**VALIDATED, callbacks=[saver])
        saved.append(with_weights_of(path) if only_weights else keras.saving.load_model(path))
    assert_same_weights(*saved)


def with_weights_of(path: Path) -> keras.Model:
    model = build()
    model.load_weights(path)
    return model


def test_checkpoints_between_epochs(tmp_path: Path) -> None:
    for runner, folder in zip(fresh_pair(), ("ours", "theirs"), strict=True):
        path = tmp_path / folder / "{epoch}-{batch}.weights.h5"
        saver = kc.ModelCheckpoint(path, save_freq=2, save_weights_only=True)
        runner.fit(**FIT, epochs=2, callbacks=[saver])
    found, wanted = (sorted((tmp_path / folder).iterdir()) for folder in ("ours", "theirs"))
    assert [path.name for path in found] == [path.name for path in wanted]
    assert len(wanted) == 3
    for path, other in zip(found, wanted, strict=True):
        assert_same_weights(with_weights_of(path), with_weights_of(other))


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


def test_save_refuses_unknown_suffixes(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Cannot write .*\.h6: .*add .*`.keras`"):
        fresh_pair()[0].save(tmp_path / "model.h6")
    assert not list(tmp_path.iterdir())


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

    backup = functools.partial(kc.BackupAndRestore, tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        mirrored(momentum).fit(**VALIDATED, callbacks=[backup(), Interrupt()])
    resumed, plain = mirrored(momentum), momentum()
    resumed.fit(**VALIDATED, callbacks=[backup()])
    plain.fit(**VALIDATED)
    assert resumed.model.history.epoch == [2, 3]
    assert_close(resumed.model.history.history["loss"], plain.history.history["loss"][2:])
    assert_same_weights(resumed.model, plain)


class Backbone(keras.Sequential):
    """A model with a method of KerasHub's backbones."""

    def save_lora_weights(self, path: Path) -> None:
        path.touch()


def test_other_ranks_write_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also not those of a model within the model."""
    backbone = Backbone([keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input((4,)), backbone])
    write_on_chief_only(model, Mock(group=Mock(is_chief=False, rank=1)))
    model.save(tmp_path / "all.keras")
    backbone.save_weights(tmp_path / "backbone.weights.h5")
    backbone.save_lora_weights(tmp_path / "adapter.lora.h5")
    assert not list(tmp_path.iterdir())
    assert "adapter.lora.h5') writes only on rank 0. Call trainer.wait" in capsys.readouterr().err
