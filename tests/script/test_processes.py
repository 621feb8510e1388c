"""Unchanged scripts under `python -m tfdist.script`, in one process and in two."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.examples.test_examples import MPIRUN
from tests.support.commands import needs_horovod
from tests.support.starting import ENVIRON, run
from tfdist.cluster.launcher.options import parse

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = [sys.executable, "-m", "tfdist.script"]
LAUNCH = [sys.executable, "-m", "tfdist.launch", "--num-workers", "2"]


def numbers(folder: Path, *command: str, code: int = 0, **environ: str) -> list[str]:
    """Runs a command, and returns its lines with numbers."""
    done = run(*command, cwd=folder, env=ENVIRON | environ, code=code)
    return [line.partition("=")[2] for line in done.stdout.splitlines() if "= " in line]


def test_launcher_runs_plain_scripts_under_tfdist_script(tmp_path: Path) -> None:
    started = [sys.executable, "-m", "tfdist.script"]
    for text, command in (
        ("import keras", started),
        ("from tensorflow import keras", started),
        ("import keras\nimport tfdist", [sys.executable]),
        ("import os, keras", started),
        ("import os", [sys.executable]),
    ):
        (path := tmp_path / "train.py").write_text(text)
        assert parse([str(path), "--epochs", "3"]).command == (*command, str(path), "--epochs", "3")
    (tmp_path / "train.py").write_text("import keras")
    as_it_is = ["--", "python", str(path)]
    assert parse(as_it_is).command == ("python", str(path))
    options = parse(["--", *started, "--checkpoints", "a", str(path)])
    assert options.resuming.command[3:7] == ("--resume", "auto", "--checkpoints", "a")


def test_errors_name_the_line_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "tpu.py").write_text("import tensorflow as tf\ntf.distribute.TPUStrategy(None)\n")
    done = run(*SCRIPT, "tpu.py", cwd=tmp_path, env=ENVIRON, code=1)
    line, error = done.stderr.splitlines()[-2:]
    assert line == "tpu.py, line 2: tf.distribute.TPUStrategy(None)"
    assert error.startswith("error: tf.distribute.TPUStrategy: tfdist runs on GPUs and CPUs.")


def test_custom_loops_stay_tensorflows(tmp_path: Path) -> None:
    done = run(*SCRIPT, str(SCRIPTS / "custom_loop.py"), cwd=tmp_path, env=ENVIRON)
    assert done.stdout == "= tensorflow.python.distribute.mirrored_strategy 7\n"
    assert "custom_loop.py, line 6: strategy.run(" in done.stderr


@pytest.mark.processes
@needs_horovod
def test_processes_agree_without_a_seed_and_print_once(tmp_path: Path) -> None:
    path = str(SCRIPTS / "processes.py")
    expected = numbers(tmp_path, *SCRIPT, "--strategy", "one_device", "--seed", "0", path,
                       PYTHONHASHSEED="0")  # fmt: skip
    assert len(expected) == 4
    for command in ([*LAUNCH, path], [*MPIRUN, *SCRIPT, path]):
        assert numbers(tmp_path, *command) == expected


@pytest.mark.processes
@needs_horovod
@pytest.mark.parametrize("name", ["horovod_keras", "horovod_tape"])
def test_horovod_scripts_run_on_keras_3(name: str, tmp_path: Path) -> None:
    path = str(SCRIPTS / f"{name}.py")
    one = numbers(tmp_path, *SCRIPT, path)
    assert len(one) == 1
    assert numbers(tmp_path, *MPIRUN, *SCRIPT, path) == one * 2


def test_killed_script_resumes_within_its_second_fit(tmp_path: Path) -> None:
    path = str(SCRIPTS / "killed.py")
    logged = [*SCRIPT, "--log-every", "2"]
    expected = numbers(tmp_path, *logged, "--checkpoints", "complete", path)
    assert len(expected) == 4
    command = [*logged, "--checkpoints", "a", "--checkpoint-every", "2", "--resume", "auto", path]
    for name, step in (("first", "5"), ("second", "4")):
        numbers(tmp_path, *command, code=-signal.SIGKILL, **{name: step})
    assert numbers(tmp_path, *command) == expected
    rows = [path.read_text() for path in sorted(tmp_path.glob("metrics-*.jsonl"))]
    assert [text.count("step_loss") for text in rows] == [4, 4]
    (tmp_path / "killed.py").write_text("\n" + Path(path).read_text())
    done = run(*command[:-1], "killed.py", cwd=tmp_path, env=os.environ | ENVIRON, code=1)
    assert re.search(r"'fit 1: killed.py:\d+' is now 'fit 1: killed.py:\d+'", done.stderr)
