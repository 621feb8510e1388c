"""`tfdist init`: six answers give a valid configuration and the command that runs it."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tfdist.cluster.launcher import options
from tfdist.config import TrainConfig
from tfdist.tools import init


def answer(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return init.main([])


@pytest.mark.parametrize(
    ("lines", "fields", "started"),
    [
        ([""] * 6, {"strategy": "mirrored", "batch_size": 64}, "tfdist.train --config"),
        (
            ["nothing", "digits", "", "two", "2", "3", "towers", "", "96"],  # one device each
            {"strategy": "multi_worker", "devices": 3, "batch_size": 96},
            "tfdist.launch --num-workers 2 --config",
        ),
        (
            ["", "a,b", "4", "1", "horovod", ""],
            {"strategy": "horovod", "devices": 1, "batch_size": 64},
            "tfdist.launch --hosts a:4,b:4 --config",
        ),
        (
            ["", "", "2", "2", "sharded", "tensor_parallel", ""],  # sharded: one device each
            {"strategy": "tensor_parallel", "devices": 2, "batch_size": 64},
            "tfdist.launch --num-workers 2 --config",
        ),
        (
            ["", "", "2", "", "parameter_server", ""],
            {"strategy": "parameter_server", "batch_size": 64},
            "tfdist.launch --num-workers 2 --num-ps 1 --config",
        ),
    ],
)
def test_answers_give_configuration_and_command(
    lines: list[str],
    fields: dict[str, Any],
    started: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer(lines, monkeypatch) == 0
    written = yaml.safe_load(Path("tfdist.yaml").read_text())
    assert written == {"recipe": "digits"} | fields
    assert TrainConfig(**written).strategy == fields["strategy"]
    line = capsys.readouterr().out.splitlines()[-1].strip()
    assert line == f"python -m {started} tfdist.yaml"
    if "launch" in line:
        assert options.parse(shlex.split(line)[3:]).command[-2:] == ("--config", "tfdist.yaml")


def test_questions_show_their_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer([""] * 6, monkeypatch) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Recipes: celeba_attributes" in shown
    assert "Devices per process (all, or a number) (all)" in shown
    assert "Strategy [one_device/mirrored" in shown


def test_existing_file_or_missing_answers_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer(["digits", ""], monkeypatch) == 1
    assert "expected six answers, one per line" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    Path("tfdist.yaml").touch()
    assert answer([""] * 6, monkeypatch) == 1
    assert "tfdist.yaml already exists. Choose another file with --file" in capsys.readouterr().err
