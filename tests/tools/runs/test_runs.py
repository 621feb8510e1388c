"""`tfdist runs` lists, compares and deletes run folders."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tfdist.tools.runs import __main__ as runs


def write(name: str, losses: list[float], *, finished: bool = True, **fields: object) -> Path:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    config = {"recipe": "digits", "epochs": 2, **fields}
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "versions.json").write_text(json.dumps({"started": f"2026-01-0{len(losses)}T10:00"}))
    lines = [json.dumps({"epoch": i, "loss": x, "val_loss": x + 1}) for i, x in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    if finished:
        (folder / "model.keras").write_bytes(b"x" * 2000)
    return folder


@pytest.fixture(autouse=True)
def three_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("first", [2.0], finished=False)
    write("second", [2.0, 1.0], learning_rate=0.1)
    write("killed", [], finished=False)


def test_list_shows_the_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["runs/second", "runs/first", "runs/killed"]
    assert "finished, 2 of 2 epochs" in lines[1]
    assert lines[1].endswith("val_loss 2")
    assert "stopped, 1 of 2 epochs" in lines[3]


def test_compare_shows_metrics_differences_and_curves(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["first", "--picture", "both.png", "runs/second"]
    assert runs.main(["compare", "--folder", "runs", *names]) == 0
    words = capsys.readouterr().out.replace("│", " ").split()
    assert [words[words.index("val_loss") + i] for i in (1, 2)] == ["3.0000", "2.0000"]
    assert words[words.index("learning_rate") + 1] == "0.1"
    assert "recipe" not in words
    with Image.open("both.png") as picture:
        assert min(picture.size) > 100


def test_clean_deletes_runs_without_an_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert runs.main(["clean"]) == 0
    assert Path("runs/killed").exists()
    assert runs.main(["clean", "--yes"]) == 0
    assert not Path("runs/killed").exists()
    assert runs.main(["clean", "--yes"]) == 0
    assert "Nothing to delete" in capsys.readouterr().out
    assert runs.main(["clean", "first", "--yes"]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["second"]


def test_invalid_arguments_raise(capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main(["list", "--folder", "elsewhere"]) == 1
    assert "elsewhere contains no runs" in capsys.readouterr().err
    assert runs.main(["compare", "first"]) == 1
    assert "compare needs at least two runs" in capsys.readouterr().err
    assert runs.main(["list", "nothing"]) == 1
    assert "nothing is not a run folder" in capsys.readouterr().err
    assert runs.main(["compare", "first", "second", "--picture", "no/curves.png"]) == 1
    assert "the folder no does not exist" in capsys.readouterr().err
    assert runs.main(["compare", "first", "second", "--picture", "curves.abc"]) == 1
    assert "expected a name that ends with .png or" in capsys.readouterr().err


def test_clean_without_a_terminal_deletes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert runs.main(["clean"]) == 1
    assert "Add --yes." in capsys.readouterr().err
    assert Path("runs/killed").exists()


def test_unreadable_run_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/killed/config.yaml").write_bytes(b"\xff: [")
    assert runs.main(["list"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[::2] == ["runs/second", "runs/first"]
    assert err.startswith("warning: runs/killed is not a run folder: ")


def test_folder_that_cannot_be_deleted_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    assert runs.main(["clean", "--yes"]) == 1
    assert "error: runs/killed cannot be deleted: " in capsys.readouterr().err
