"""The run folder: its files, and when it is refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import keras
import pytest
import yaml

import tfdist
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run.folder import RunFolder

MODEL = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
MODEL.compile("sgd", "mse")
FACTS = {"optimizer": "SGD: 0.01"}


def test_contains_configuration_and_versions(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=str(tmp_path / "a" / "b"), epochs=3)
    folder = RunFolder.create(config, MODEL, FACTS)
    assert folder.path == tmp_path / "a" / "b"
    assert TrainConfig(**yaml.safe_load((folder.path / "config.yaml").read_text())) == config
    assert (folder.path / "config.yaml").read_text().startswith("# optimizer: SGD: 0.01\nrecipe: ")
    versions = json.loads((folder.path / "versions.json").read_text())
    assert versions["tfdist"] == tfdist.__version__
    assert versions["keras"] == keras.__version__
    assert versions["tensorflow"].startswith("2.")


def test_new_folders_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(recipe="digits", strategy="mirrored")
    paths = [RunFolder.create(config, MODEL, FACTS).path for _ in range(3)]
    assert len(set(paths)) == 3
    assert all(path.match("runs/digits-mirrored-*") for path in paths)


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=str(tmp_path))
    RunFolder.create(config, MODEL, FACTS).metrics.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="Use another folder with --run-dir"):
        RunFolder.create(config, MODEL, FACTS)


def test_a_smoke_run_replaces_only_a_smoke_run(tmp_path: Path) -> None:
    smoke = TrainConfig(run_dir=str(tmp_path), smoke=True)
    RunFolder.create(smoke, MODEL, FACTS).metrics.write_text("{}\n")
    RunFolder.create(smoke, MODEL, FACTS).metrics.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="already contains a run"):
        RunFolder.create(smoke.model_copy(update={"smoke": False}), MODEL, FACTS)


def test_folder_of_a_failed_start_is_reused(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=str(tmp_path))
    RunFolder.create(config, MODEL, FACTS)
    RunFolder.create(config, MODEL, FACTS)


def test_damaged_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "epoch-0001-step-000000004").mkdir(parents=True)
    (tmp_path / "config.yaml").write_bytes(b"\xb3\xff")
    with pytest.raises(ConfigurationError, match=r"a config\.yaml that cannot be read"):
        RunFolder.create(TrainConfig(run_dir=str(tmp_path), resume="auto"), MODEL, FACTS)


def test_files_of_killed_runs_are_removed(tmp_path: Path) -> None:
    for name in (".model.123.keras", ".curves.9.png", ".probe.77", ".notes", "model.1.keras"):
        (tmp_path / name).write_text("half")
    RunFolder.create(TrainConfig(run_dir=str(tmp_path)), MODEL, FACTS).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.yaml", "versions.json", ".notes", "model.1.keras"}


def test_file_in_place_of_the_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigurationError, match=r"Cannot write the run folder .*: .*File exists"):
        RunFolder.create(TrainConfig(run_dir=str(tmp_path / "a")), MODEL, FACTS)


def test_resuming_on_a_read_only_disk_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    config = TrainConfig(run_dir=str(tmp_path), resume="auto")
    RunFolder.create(config, MODEL, FACTS).close()
    (tmp_path / "checkpoints" / "epoch-0001-step-000000004").mkdir(parents=True)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigurationError, match=r"Cannot write the run folder .*: .*Read-only"):
        RunFolder.create(config, MODEL, FACTS)


def test_folder_in_use_raises(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=str(tmp_path), resume="auto")
    folder = RunFolder.create(config, MODEL, FACTS)
    with pytest.raises(ConfigurationError, match="in use by another run: process"):
        RunFolder.create(config, MODEL, FACTS)
    folder.close()
    RunFolder.create(config, MODEL, FACTS).close()


def test_discarding_removes_only_what_was_created(tmp_path: Path) -> None:
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "a" / "b")), MODEL, FACTS)
    folder.discard()
    assert not list(tmp_path.iterdir())
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(TrainConfig(run_dir=str(tmp_path)), MODEL, FACTS).discard()
    assert (tmp_path / "notes.txt").exists()
