"""Outputs of a run: profiles, logs and exported models; and later evaluations."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import train
from tfdist.callbacks.profile import Seconds
from tfdist.errors import ConfigurationError, TfdistError
from tfdist.run import loggers, reports, saved_model

#: Of the run: others may read nothing, and the group may not write.
UMASK = 0o027
RECIPE = ["--recipe=recipes._template", "--strategy=mirrored", "--devices=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with every option that writes files."""
    folder = tmp_path_factory.mktemp("run") / "folder"
    flags = ["--epochs=2", "--steps-per-call=2", "--verbose=0", "--profile", f"--run-dir={folder}"]
    mask = os.umask(UMASK)
    try:
        assert (
            train.main([*RECIPE, *flags, "--logger=csv,tensorboard", "--export=saved_model"]) == 0
        )
    finally:
        os.umask(mask)
    return folder


def test_files_have_the_permissions_that_the_umask_allows(run: Path) -> None:
    modes = {path: path.stat().st_mode & 0o777 for path in [run, *run.rglob("*")]}
    expected = {path: (0o777 if path.is_dir() else 0o666) & ~UMASK for path in modes}
    assert modes == expected


def test_loggers_write_the_same_metrics(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(lines)
    of_epochs = [float(row["val_loss"]) for row in rows if row["epoch"]]
    assert of_epochs == [line["val_loss"] for line in lines if "epoch" in line]
    assert list((run / "tensorboard" / "train").iterdir())


def test_profile_is_written(run: Path) -> None:
    assert list((run / "tensorboard" / "plugins" / "profile").rglob("*.xplane.pb"))


def test_exported_model_equals_the_saved_one(run: Path) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (3, 2)).astype("float32")
    saved = keras.saving.load_model(run / "model.keras").predict(x, verbose=0)
    exported = tf.saved_model.load(run / "saved_model")
    np.testing.assert_allclose(exported.serve(x), saved, rtol=1e-6)


@pytest.mark.parametrize("saved", ["model.keras", "checkpoints", ""])
def test_evaluate_repeats_the_validation_metrics(
    saved: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--config={run / 'config.yaml'}", "--verbose=2"]
    assert train.main([*flags, f"--evaluate=file://{run / saved}"]) == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    shown = capsys.readouterr().out
    for name in ("loss", "accuracy"):
        (value,) = re.findall(rf"\b{name} +│ +([\d.]+)", shown)
        assert float(value) == pytest.approx(last[f"val_{name}"], rel=1e-5)


def test_checkpoint_is_evaluated_without_its_learning_rate_schedule(
    run: Path, tmp_path: Path
) -> None:
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text("{lr_rule: cosine, warmup_epochs: 2}")  # longer than the limited epochs
    flags = [f"--config={run / 'config.yaml'}", f"--config={schedule}", "--limit-steps=1"]
    assert train.main([*flags, "--verbose=0", f"--evaluate={run}"]) == 0


def test_evaluating_an_invalid_file_raises(tmp_path: Path) -> None:
    (tmp_path / "text.keras").write_text("text")
    with pytest.raises(ConfigurationError, match="expected a model that Keras saved"):
        saved_model.load(str(tmp_path / "text.keras"))
    keras.Sequential([keras.Input((2,))]).save(tmp_path / "bare.keras")
    with pytest.raises(ConfigurationError, match="without loss and metrics"):
        saved_model.load(str(tmp_path / "bare.keras"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--evaluate=model.keras", "--epochs=3"], "--epochs has no effect with --evaluate"),
        (["--evaluate=model.keras", "--run-dir=x"], "--run-dir has no effect with --evaluate"),
        (["--evaluate=s3://"], "--evaluate s3://: expected a bucket"),
        (["--evaluate=nowhere.keras"], "--evaluate nowhere.keras: the file does not exist"),
        (["--logger=wandb"], "--logger wandb needs wandb: pip install wandb"),
        (["--export=onnx"], "--export onnx needs tf2onnx: pip install tf2onnx"),
    ],
)
def test_invalid_options_fail_before_training(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (loggers, saved_model):
        absent = SimpleNamespace(
            find_spec=lambda name: None if name in ("wandb", "tf2onnx") else name
        )
        monkeypatch.setattr(module, "importlib", SimpleNamespace(util=absent))
    assert train.main([*RECIPE, *flags]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_profile_table(capsys: pytest.CaptureFixture[str]) -> None:
    profile: Any = SimpleNamespace(seconds=Seconds(10, 0.05, 0.01, 0.02), traced=12)
    rows = {name: (ms, share) for name, ms, share in reports.profile_table(profile, (0.001, 4e6))}
    assert rows == {
        "computing": ("3.000", "43%"),
        "exchange": ("1.000", "14%"),
        "data": ("1.000", "14%"),
        "Python": ("2.000", "29%"),
        "all": ("7.000", "100%"),
    }
    reports.print_profile(profile, (0.001, 4e6))
    assert "over 10 steps; 12 others are in the trace; the all-reduce of 4 MB" in (
        " ".join(capsys.readouterr().out.split())
    )
    profile.seconds = Seconds()
    reports.print_profile(profile, None)
    assert "no steps to measure" in capsys.readouterr().out


def test_exporting_an_unsupported_model_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(tmp_path / "model.keras")

    def refuse(*args: Any, **options: Any) -> None:
        raise NotImplementedError("no such layer there\nand more")

    monkeypatch.setattr(keras.Model, "export", refuse)
    with pytest.raises(TfdistError, match=r"--export tflite: .*no such layer there\n.* is saved"):
        saved_model.export(["tflite"], tmp_path / "model.keras")


def test_max_time_saves_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--epochs=1000000", "--max-time=3s", "--verbose=2", f"--run-dir={tmp_path / 'run'}"]
    assert train.main(["--recipe=recipes._template", *flags]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"stopped .* by --max-time .*\n.*latest weights .* model\.keras ", shown)
    assert keras.saving.load_model(tmp_path / "run" / "model.keras").optimizer.iterations > 0
