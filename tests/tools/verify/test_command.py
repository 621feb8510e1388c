"""The verify command passes correct strategies, and reports the differences of wrong ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from tests.support import starting
from tfdist import strategies
from tfdist.errors import ConfigurationError, TooFewDevicesError
from tfdist.strategies import mirrored_variables
from tfdist.strategies.mirrored import Mirrored
from tfdist.tools.verify import results, trial
from tfdist.tools.verify.__main__ import main
from tfdist.tools.verify.results import Difference, Verdict
from tfdist.tools.verify.trial import judge


class ByCount(Mirrored):
    """Averages the replicas' sums as if all had the same number of rows: a common mistake."""

    def all_reduce(self, tensors: list) -> list:
        return [total / self.num_replicas for total in super().all_reduce(tensors)]


def run(
    folder: Path, *arguments: str, code: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfdist.tools.verify", *arguments]
    return starting.run(*command, cwd=folder, env=starting.ENVIRON | environ, code=code)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_correct_strategy_passes(num_replicas: int) -> None:
    verdict = judge(strategies.create("mirrored", num_replicas))
    assert verdict.passed
    assert verdict.num_replicas == num_replicas
    assert 0 < verdict.differences[0].times < 1
    names = " ".join(d.what for d in verdict.differences)
    for number in ("weight", "gamma", "history loss", "evaluation accuracy", "optimizer steps"):
        assert number in names


def test_wrong_strategy_fails_and_reports_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        strategies.STRATEGIES, "wrong", strategies.Declaration(f"{__name__}:ByCount")
    )
    assert main(["--strategy", "wrong", "--devices", "2"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("FAIL wrong, 2 replicas\n")
    assert "on rank 0" in output
    assert "times the tolerance" in output


def test_diverging_replicas_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica differs by less than the tolerance."""
    fingerprint = trial._fingerprint

    def drifted(model: keras.Model) -> float:
        for copy in mirrored_variables.copies_of(model.weights[0].value).values():
            copy.assign(copy + 1e-6)
        return fingerprint(model)

    monkeypatch.setattr(trial, "_fingerprint", drifted)
    verdict = judge(strategies.create("mirrored", 2))
    assert verdict.inconsistent == [0]
    assert not verdict.differing
    assert "not bitwise identical to those of rank 0, on rank 0" in results.as_text(
        "drifting", verdict
    )


def test_json_has_all_values_and_no_infinity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--strategy", "towers", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    assert document["strategies"]["towers"]["num_replicas"] == 2
    absent = Verdict("s", 1, 1, [Difference("weight", float("inf"), float("inf"))], [0], [])
    output = json.loads(results.as_json({"s": absent}))
    assert output["passed"] is False
    assert output["strategies"]["s"]["differences"][0]["size"] is None


def test_inexact_strategy_raises() -> None:
    strategy = strategies.create("one_device")
    strategy.inexact = {"rounding": "it is coarse"}
    with pytest.raises(ConfigurationError, match=r"rounding: it is coarse.*--devices 1"):
        judge(strategy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "mirored"], "Did you mean mirrored?"),
        (["--strategy", "towers", "--num-workers", "2"], "--devices"),
        (["--num-workers", "0"], "--num-workers: expected"),
    ],
)
def test_errors_are_short(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    output = capsys.readouterr().err
    assert output.startswith("error: ")
    assert message in output
    assert len(output.splitlines()) <= 2


def test_worker_of_a_job_starts_no_workers(tmp_path: Path) -> None:
    tasks = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    flags = ["--strategy", "horovod", "--num-workers", "2"]
    done = run(tmp_path, *flags, code=1, TF_CONFIG=json.dumps(tasks))
    assert "this process is already one of 2" in done.stderr


@pytest.mark.processes
def test_starts_workers_which_all_compare(tmp_path: Path) -> None:
    done = run(tmp_path, "--strategy", "multi_worker", "--num-workers", "2", "--json")
    verdict = json.loads(done.stdout)["strategies"]["multi_worker"]
    assert (verdict["num_workers"], verdict["num_replicas"]) == (2, 2)


@pytest.mark.processes
def test_time_is_bounded(tmp_path: Path) -> None:
    flags = ["--strategy", "multi_worker", "--num-workers", "2", "--timeout", "1"]
    done = run(tmp_path, *flags, code=1)
    assert "did not finish within 1 s" in done.stderr


def test_too_few_devices_are_no_failure_of_all_strategies() -> None:
    outcome = TooFewDevicesError("needs two devices")
    assert results.healthy(outcome)
    assert results.as_text("tensor_parallel", outcome) == "NONE tensor_parallel: needs two devices"
