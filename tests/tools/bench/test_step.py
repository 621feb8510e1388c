"""The step benchmark: that it runs and writes results, not its speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.__main__
import tfdist.tools.bench.__main__
from benchmarks.scaling import ENGINES
from tests.support import starting
from tfdist.tools.bench import scaling
from tfdist.tools.bench.__main__ import main

CONTENDERS = [
    "tfdist", "tfdist, every batch", "by hand", "Keras", "Keras, every batch", "Keras, in graph",
]  # fmt: skip


def run(
    folder: Path, *arguments: str, program: str = "tfdist.tools.bench", code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark; skips the test if it needs network namespaces, which are not allowed."""
    done = starting.run(sys.executable, "-m", program, *arguments, cwd=folder, code=None)
    if "cannot create two hosts" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_help_of_one_benchmark_needs_no_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    (tmp_path / "keras.py").write_text("raise SystemExit('Keras was imported')")
    done = run(tmp_path, "step", "--help")  # -m puts the working folder first on the path
    assert "--models {mlp,cnn,resnet," in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stap"], "stap"),
        (["step", "--models", "vgg"], "mlp, cnn, resnet"),
        (["step", "--rounds", "0"], "rounds"),
    ],
)
def test_invalid_flag_prints_two_lines(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run(tmp_path, *arguments, code=1)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_device_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, chart = tmp_path / "device.json", tmp_path / "device.png"
    files = ["--json", str(results), "--chart", str(chart)]
    assert main(["device", "--smoke", "--rounds", "1", *files]) == 0
    assert "There is no GPU: only the CPU is measured." in capsys.readouterr().out
    rows = json.loads(results.read_text())["results"]
    assert {row["what"] for row in rows} >= {"addition", "convolution 3x3", "matrix product"}
    assert all(row["rate"] > 0 for row in rows)
    assert chart.exists()


def test_sweep_smoke(tmp_path: Path) -> None:
    results, chart = tmp_path / "sweep.json", tmp_path / "sweep.png"
    assert main(["sweep", "--smoke", "--json", str(results), "--chart", str(chart)]) == 0
    rows = json.loads(results.read_text())["results"]
    assert [row["batch"] for row in rows] == [1, 8]
    assert all(0 < row["utilization"] < 1.1 for row in rows)
    assert sum(row.get("saturates", False) for row in rows) == 1
    assert chart.exists()


@pytest.mark.parametrize("model", ["mlp", pytest.param("resnet", marks=pytest.mark.long)])
def test_smoke_measures_every_contender(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "step.json"
    assert main(["step", "--smoke", "--models", model, "--json", str(results)]) == 0
    document = json.loads(results.read_text())
    assert document["benchmark"] == "step"
    assert {"cores", "versions", "share_of_other_processes"} <= document["machine"].keys()
    cases = [(result["model"], result["replicas"]) for result in document["results"]]
    assert cases == [(model, 1), (model, 2)]
    for result in document["results"]:
        contenders = result["contenders"]
        assert list(contenders) == CONTENDERS
        for name, own in contenders.items():
            assert len(own["samples_ms"]) == result["rounds"]
            assert own["examples_per_s"]["median"] > 0
            assert own["first_loss"] == pytest.approx(contenders["tfdist"]["first_loss"], rel=1e-3)
            assert ("tfdist_ratio" in own) == (name != "tfdist")
        assert contenders["by hand"]["tfdist_ratio"]["goal"] == 1.05
    assert "the losses of the variants differ" not in capsys.readouterr().out


@pytest.mark.long
def test_smoke_measures_evaluations_and_predictions(tmp_path: Path) -> None:
    run(
        tmp_path, "step", "--smoke", "--models", "mlp", "--what", "evaluate", "predict",
        "--json", "step.json",
    )  # fmt: skip
    results = json.loads((tmp_path / "step.json").read_text())["results"]
    assert [(r["what"], r["replicas"]) for r in results] == [
        (what, replicas) for replicas in (1, 2) for what in ("evaluate", "predict")
    ]
    for result in results:
        losses = [own["first_loss"] for own in result["contenders"].values()]
        assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-3)
        assert ("by hand" in result["contenders"]) == (result["replicas"] == 1)


@pytest.mark.long
def test_smoke_measures_the_checks_between_workers(tmp_path: Path) -> None:
    line = ["step", "--smoke", "--models", "mlp", "--what", "checks", "--json", "step.json"]
    run(tmp_path, *line)
    (result,) = json.loads((tmp_path / "step.json").read_text())["results"]
    assert (result["what"], result["replicas"]) == ("checks", 2)
    contenders = result["contenders"]
    assert list(contenders) == ["tfdist", "checks off"]
    assert contenders["checks off"]["tfdist_ratio"]["goal"] == 1.05
    assert contenders["checks off"]["first_loss"] == contenders["tfdist"]["first_loss"]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_smoke_measures_mixed_precision(precision: str, tmp_path: Path) -> None:
    line = ["step", "--smoke", "--models", "mlp", "--replicas", "1", "--batch", "16"]
    line += ["--precision", precision, "--jit-compile", "true", "--json", "step.json"]
    run(tmp_path, *line)
    (result,) = json.loads((tmp_path / "step.json").read_text())["results"]
    options = (result["precision"], result["batch_size"], result["jit_compile"])
    assert options == (precision, 16, True)
    losses = [own["first_loss"] for own in result["contenders"].values()]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=2e-2)


@pytest.mark.long
def test_profile_compares_the_two_graphs(tmp_path: Path) -> None:
    done = run(tmp_path, "step", "--smoke", "--models", "mlp", "--replicas", "1", "--profile")
    for words in ("operations with tfdist", "microseconds per step", "tf.data"):
        assert words in done.stdout


# ---- bench workers ----


class Fixed:
    """A pool whose workers report given times."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.num_workers = 1 if "one process" in engine else 2

    def ask(self, model: str, way: str, num_steps: int) -> list[float]:
        times = {"one process": 100.0, "two apart": 110.0, "PyTorch, one process": 80.0,
                 "PyTorch, two apart": 80.0, "PyTorch, Gloo": 100.0}  # fmt: skip
        own = times.get(self.engine, 125.0 if way == "tfdist" else 120.0)
        return [own] * self.num_workers


def test_scaling_numbers_follow_from_the_times() -> None:
    pools = {name: Fixed(name) for name in ENGINES if name != "Horovod, MPI"}
    workload = scaling.MODELS["cnn"]
    result = scaling.measure("cnn", workload, pools, 2, ENGINES)  # type: ignore[arg-type]
    rows = {(row["engine"], row["way"]): row for row in result["rows"]}
    ours = rows["multi_worker", "tfdist"]
    assert ours["images_per_s"]["median"] == pytest.approx(2 * 64 / 0.125)
    assert ours["efficiency"]["median"] == pytest.approx(0.8)
    assert ours["exchange"]["median"] == pytest.approx(1 - 110 / 125)
    assert ours["to_by_hand"]["median"] == pytest.approx(125 / 120)
    assert ours["to_by_hand"]["met"] is True
    assert ours["efficiency"]["met"] is True  # PyTorch's is 0.8, too
    assert "efficiency" not in rows["one process", "tfdist"]


@pytest.mark.processes
def test_allreduce_smoke(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--chart", str(tmp_path / "a.png")]
    assert main(["allreduce", "--smoke", "--engines", "mirrored", "multi_worker", *files]) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert [result["bytes"] for result in document["results"]] == [1000, 100_000]
    for result in document["results"]:
        assert list(result["engines"]) == ["mirrored", "multi_worker", "memory copy"]
        assert all(own["gb_per_s"]["median"] > 0 for own in result["engines"].values())
    assert (tmp_path / "a.png").stat().st_size > 0


NAMES = [
    (program, name)
    for program, commands in (
        ("tfdist.tools.bench", tfdist.tools.bench.__main__.COMMANDS),
        ("benchmarks", benchmarks.__main__.COMMANDS),
    )
    for name in sorted(set(commands) - {"all", "compare"})
]


def test_unknown_benchmark_raises_immediately(tmp_path: Path) -> None:
    done = run(tmp_path, "all", "--only", "step", "stap", code=1)
    assert "--only stap: expected one or more of allreduce, " in done.stderr


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("program", "name"), NAMES)
def test_smoke_writes_the_results(program: str, name: str, tmp_path: Path) -> None:
    run(tmp_path, "all", "--smoke", "--only", name, program=program)
    document = json.loads((tmp_path / "bench" / f"{name}.json").read_text())
    assert document["benchmark"] == name
