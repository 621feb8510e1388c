"""A full disk is reported before training, and costs no model after it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from recipes import _template
from tfdist import train
from tfdist.callbacks.curves import Curves
from tfdist.callbacks.step_log import StepLog
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run import saved_model
from tfdist.run.folder import RunFolder


@pytest.fixture
def model() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    return model


def test_failed_save_keeps_the_previous_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: keras.Model
) -> None:
    monkeypatch.chdir(tmp_path)  # one of the places to which it is saved instead
    path = tmp_path / "model.keras"
    assert saved_model.save_model(model, path) == (path, None)
    rows = np.ones((4, 3), "float32")
    np.testing.assert_array_equal(keras.saving.load_model(path)(rows), model(rows))
    before = path.read_bytes()
    with pytest.raises(OSError, match="disk full"):
        saved_model.save_model(Unsaveable(), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.keras"]


class Unsaveable:
    def save(self, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")


def test_full_disk_raises_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: keras.Model
) -> None:
    sizes: list[int] = []

    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        sizes.append(num_bytes)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigurationError, match=r"No space left on device\. Free some"):
        RunFolder.create(TrainConfig(run_dir=str(tmp_path)), model, {})
    assert sizes[0] > 4 * model.count_params()
    assert {file.name for file in tmp_path.iterdir()} == {"config.yaml", "versions.json"}


def test_probe_leaves_nothing(tmp_path: Path, model: keras.Model) -> None:
    saved_model.probe_space(tmp_path, model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (tf.errors.ResourceExhaustedError(None, None, "a; No space left on device"), True),
        (tf.errors.ResourceExhaustedError(None, None, "out of memory"), False),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), False),
    ],
)
def test_recognizes_errors_of_a_full_disk(error: Exception, is_full: bool) -> None:
    assert bool(saved_model.full_disk_message(error)) == is_full


def test_model_is_saved_elsewhere_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the metrics of the last epoch nor the model can be written into the run folder."""
    monkeypatch.chdir(tmp_path)
    run, save = tmp_path / "run", keras.Model.save

    def refuse(path: Path) -> None:
        if run in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(StepLog, "on_train_end", lambda *_: refuse(run / "metrics.jsonl"))
    monkeypatch.setattr(keras.Model, "save", lambda m, path: (refuse(path), save(m, path)))
    flags = ["--recipe=recipes._template", "--limit-steps=3", "--epochs=1", "--verbose=0"]
    assert train.main([*flags, f"--run-dir={run}"]) == 1
    message = capsys.readouterr().err
    assert f"error: {run}: some files could not be written: No space left on device. The" in message
    (saved,) = tmp_path.glob("tfdist-*/model.keras")
    assert f"The model after 3 steps is {saved}." in message
    assert int(keras.saving.load_model(saved).optimizer.iterations) == 3


@pytest.mark.parametrize("moment", ["interrupted", "report"])
def test_disk_that_is_full_after_the_training_is_an_error(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if moment == "interrupted":
        monkeypatch.setattr(StepLog, "on_epoch_end", interrupt)
        monkeypatch.setattr(Curves, "on_train_end", full)
    else:
        monkeypatch.setattr(_template, "report", full, raising=False)
        monkeypatch.setattr("tfdist.run.recipe.report", full)
    flags = ["--recipe=recipes._template", "--limit-steps=3", "--epochs=1", "--verbose=0"]
    assert train.main([*flags, f"--run-dir={tmp_path / 'run'}"]) == 1
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert "No space left on device. The model after 3 steps is" in message
    assert "Free some space, then continue with --resume auto." in message
    assert (tmp_path / "run" / "model.keras").exists()
