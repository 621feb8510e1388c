"""`tfdist tune search`, with small programs in place of trainings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import optuna
import psutil
import pytest

from tests.support import ROOT
from tests.support.commands import wait_for
from tfdist.errors import ConfigurationError, LaunchError
from tfdist.tools.tune import __main__ as tune
from tfdist.tools.tune import search, space, study

#: A training of one epoch with the loss (x - 3)^2, which does not end while `hang-x` exists.
PROGRAM = """
import json, os, pathlib, sys, time
words = sys.argv[1:]
x = float(words[words.index("--set") + 1].split("=")[1])
folder = pathlib.Path(words[words.index("--run-dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts.txt").open("a") as file:
    print(x, os.environ.get("CUDA_VISIBLE_DEVICES"), file=file)
if pathlib.Path("fail").exists():
    sys.exit("error: no such network")
line = {"epoch": 1, "loss": (x - 3) ** 2, "seconds": 1.0}
(folder / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
while pathlib.Path(f"hang-{x:g}").exists():
    time.sleep(0.05)
"""
#: Searches all values from 1 to 4.
SEARCH = """
import sys
from tests.tools.tune.test_search import make, search_all
search_all(make("study"))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("training.py").write_text(PROGRAM)
    return tmp_path


def make(
    folder: str, over: str = "set.x=1:4", sampler: str = "grid", **options: bool
) -> study.Study:
    dimensions = [space.parse(over)]
    options = {"maximize": False, "pruning": False} | options
    return study.Study(Path(folder), dimensions, "loss", [], sampler=sampler, seed=0, **options)


def search_all(created: study.Study, trials: int = 99, jobs: int = 1, num_gpus: int = 0) -> None:
    study.search(created, [sys.executable, "training.py"], trials, jobs, num_gpus)


def starts(name: str) -> list[str]:
    return Path("study", name, "starts.txt").read_text().splitlines()


def test_grid_ends_when_every_value_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    created = make("study")
    search_all(created, jobs=2, num_gpus=2)
    results = created.results()
    assert results[0].values == {"set.x": "3"}
    assert [result.value for result in results] == [0, 1, 1, 4]
    gpus = {starts(result.folder.name)[0].split()[1] for result in results}
    assert gpus == {"4,5", "6,7"}
    search_all(make("study"))
    assert len(starts("trial-000")) == 1
    with pytest.raises(ConfigurationError, match="study with other flags"):
        make("study", "set.x=1:5")


def test_killed_search_is_resumed() -> None:
    for x in (1, 2, 3, 4):
        Path(f"hang-{x}").touch()
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", SEARCH], env=environ) as process:
        first, second = Path("study/trial-000/metrics.jsonl"), Path("study/trial-001/metrics.jsonl")
        wait_for(first.exists)
        x = starts("trial-000")[0].split()[0]
        Path(f"hang-{float(x):g}").unlink()
        wait_for(second.exists)
        training = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(one.is_running() and "training.py" in _line(one) for one in training))
    lost = starts("trial-001")
    for x in (1, 2, 3, 4):
        Path(f"hang-{x}").unlink(missing_ok=True)
    created = make("study")
    search_all(created)
    assert [result.state for result in created.results()] == ["complete"] * 4
    names = sorted(result.folder.name for result in created.results())
    assert names == ["trial-000", "trial-001", "trial-002", "trial-003"]
    assert len(starts("trial-000")) == 1
    assert starts("trial-001") == 2 * lost


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_pruning_stops_a_run_that_is_worse_than_the_median() -> None:
    created = make("study", "set.x=1", "random", pruning=True)
    for _ in range(5):
        better = optuna.trial.create_trial(value=0.5, intermediate_values={1: 0.5})
        created._study.add_trial(better)
    Path("hang-1").touch()
    search_all(created, trials=1)
    assert [result.state for result in created.results()] == ["pruned"]


def test_search_ends_when_all_runs_fail() -> None:
    Path("fail").touch()
    with pytest.raises(LaunchError, match=r"first 3 runs failed\. The last error: no such network"):
        search_all(make("study"))


def test_diverged_run_is_not_the_best() -> None:
    diverging = PROGRAM.replace(
        "while pathlib",
        """
if x == 3:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 2, "loss": None}) + "\\n")
while pathlib""",
    )
    Path("training.py").write_text(diverging)
    created = make("study")
    search_all(created)
    results = created.results()
    assert [result.state for result in results] == ["complete"] * 3 + ["failed"]
    assert [result.value for result in results] == [1, 1, 4, None]


def test_search_without_a_complete_run_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["search", "--over", "strategy=bad", "--trials", "1"]) == 1
    assert "error: no run of study is complete" in capsys.readouterr().err


def test_study_that_cannot_be_written_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--over", "batch_size=8", "--folder", "training.py/study"]
    assert tune.main(["search", *arguments]) == 1
    assert "error: Cannot write the study: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--over", "batch_size"], "expected FLAG=A,B,C"),
        (["--over", "batchsize=1,2"], "Did you mean batch_size?"),
        (["--over", "run_dir=a,b"], "cannot be searched"),
        (["--over", "learning_rate=log:0:1"], "LOW larger than 0"),
        (["--over", "learning_rate=a:b"], "expected FLAG=A,B,C"),
        (
            ["--over", "epochs=1,2", "--", "--run-dir", "a"],
            "--run-dir is not supported: the search chooses",
        ),
        (["--over", "momentum=0:0.9", "--sampler", "grid"], "momentum=0,0.9"),
        (["--over", "epochs=1,2", "--metric", "val_dice"], "Add --mode max"),
    ],
)
def test_invalid_searches_raise_before_the_first_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(["search", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not Path("study").exists()


def test_flags_of_the_training_without_dashes_name_the_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tune.main(["search", "--over", "batch_size=8,16", "--epochs", "1"]) == 1
    assert "Write flags of python -m tfdist.train after --" in capsys.readouterr().err


def test_values_become_flags() -> None:
    assert space.flags({"batch_size": "32", "set.width": "8"}) == [
        "--batch-size=32", "--set", "width=8"
    ]  # fmt: skip
    trial = optuna.trial.FixedTrial({"learning_rate": 0.00123456, "epochs": 3})
    assert space.parse("learning-rate=log:1e-4:1e-1").suggest(trial) == "0.001235"
    assert space.parse("--epochs=1:4").suggest(trial) == "3"
    assert search._should_maximize("val_accuracy", "auto")


# The other tests search with a program that trains nothing.
@pytest.mark.long
def test_trains_digits_and_prints_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    training = ["--recipe", "digits", "--model", "mlp", "--epochs", "1", "--data-dir", "data"]
    line = ["search", "--over", "learning_rate=0.01,0.0001", "--sampler", "grid"]
    assert tune.main([*line, "--metric", "val_accuracy", "--", *training]) == 0
    out = capsys.readouterr().out
    assert "2 complete runs in study" in out
    assert f"{' '.join(training)} --learning-rate=0.01\n" in out
    assert Path("study/trial-000/model.keras").exists()
