"""What the training command does with checkpoints that it cannot resume from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist import Trainer, train

FLAGS = ["--recipe=recipes._template", "--strategy=one_device", "--verbose=0", "--epochs=2"]
FLAGS += ["--log-every=epoch"]

_FAILING = """
import keras
from recipes._template import DEFAULTS, build_model, train_data, validation_data

class Failing(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise ValueError("mine")

def callbacks(config):
    return [Failing()]
"""


def damage(run: Path) -> list[Path]:
    """Damages all checkpoints of a run, and returns their paths."""
    states = list(run.glob("checkpoints/epoch-*/state.json"))
    for state in states:
        state.write_text("[]")
    return [state.parent for state in states]


def test_run_with_damaged_checkpoints_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = [*FLAGS, f"--run-dir={run}"]
    assert train.main(flags) == 0
    (run / "model.keras").unlink()  # as if it had been killed
    damaged = damage(run)
    metrics = (run / "metrics.jsonl").read_text()
    capsys.readouterr()

    assert train.main([*flags, "--resume=auto"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert all(str(path) in line for path in damaged)
    assert "--resume never" in line
    assert (run / "metrics.jsonl").read_text() == metrics
    assert all(path.exists() for path in damaged)

    assert train.main([*flags, "--resume=never"]) == 0
    assert (run / "damaged-metrics.jsonl").read_text() == metrics
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert {p.name for p in run.glob("checkpoints/damaged-*")} == {
        f"damaged-{path.name}" for path in damaged
    }
    assert train.main([*flags, "--resume=auto"]) == 0


@pytest.mark.parametrize("resume", ["/nope", "auto"])
def test_run_that_fails_at_its_start_leaves_no_folder(
    resume: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a" / "run"
    flags = [*FLAGS, f"--run-dir={run}", f"--resume={resume}"]
    if resume == "auto":
        recipe = tmp_path / "failing.py"
        recipe.write_text(_FAILING)
        assert train.main([*flags, f"--recipe={recipe}"]) == 1
        assert "ValueError: mine" in capsys.readouterr().err
    else:
        assert train.main(flags) == 1
        printed = capsys.readouterr()
        assert "--resume /nope: there is no such folder" in printed.err
        assert not printed.out  # nothing is built before
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("did_step", [False, True])
def test_second_interrupt_before_the_first_checkpoint_says_how_to_start_again(
    did_step: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a step, `--resume auto` starts from the beginning; else the model is a result."""

    def fit(trainer: Trainer, *_: object, **__: object) -> None:
        trainer.stats.last_call = object() if did_step else None
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", fit)
    monkeypatch.setattr("tfdist.run.reports.summary", lambda *_: None)
    run = tmp_path / "run"
    flags = ["--recipe=recipes._template", f"--run-dir={run}", "--verbose=0", "--resume=auto"]
    assert train.main(flags) == 130
    message = capsys.readouterr().err
    if did_step:
        assert (run / "model.keras").exists()
        assert f"use another folder with --run-dir, or remove {run}." in message
    else:
        assert f"--run-dir {run} --resume auto" in message
        assert train.main(flags) == 130  # not refused
