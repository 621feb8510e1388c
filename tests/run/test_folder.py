from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import yaml

import tfdist
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run.folder import RunFolder


def test_holds_configuration_and_versions(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=str(tmp_path / "a" / "b"), epochs=3)
    folder = RunFolder.create(config)
    assert folder.path == tmp_path / "a" / "b"
    assert TrainConfig(**yaml.safe_load((folder.path / "config.yaml").read_text())) == config
    versions = json.loads((folder.path / "versions.json").read_text())
    assert versions["tfdist"] == tfdist.__version__
    assert versions["keras"] == keras.__version__
    assert versions["tensorflow"].startswith("2.")


def test_new_folders_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(recipe="digits", strategy="mirrored")
    paths = [RunFolder.create(config).path for _ in range(3)]
    assert len(set(paths)) == 3
    assert all(path.match("runs/digits-mirrored-*") for path in paths)


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=str(tmp_path))
    RunFolder.create(config).metrics.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="name another folder with --run-dir"):
        RunFolder.create(config)


def test_run_that_failed_at_its_start_is_not_in_the_way(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=str(tmp_path))
    RunFolder.create(config)
    RunFolder.create(config)


def test_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        RunFolder.create(TrainConfig(run_dir=str(tmp_path / "a")))


def test_model_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path)))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    folder.save_model(model)
    again = keras.saving.load_model(folder.model)
    rows = np.ones((4, 3), "float32")
    np.testing.assert_array_equal(again(rows), model(rows))

    class Unsaveable:
        def save(self, path: Path) -> None:
            path.write_bytes(b"half")
            raise OSError("disk full")

    before = folder.model.read_bytes()
    with pytest.raises(OSError, match="disk full"):
        folder.save_model(Unsaveable())
    assert folder.model.read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
