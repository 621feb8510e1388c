"""TensorFlow's messages are hidden, and tasks run in parallel and in order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pipelines import DataError
from pipelines.console import parallel_tasks
from tests.support import ROOT, starting

PROGRAM = """
from pipelines.console.quiet import quieten_tensorflow
quieten_tensorflow()
import os, tensorflow
os.write(2, b"and after")
print(tensorflow.level)
"""


def run(folder: Path, tensorflow: str, program: str, **variables: str) -> tuple[str, str]:
    """Runs a program with a module as TensorFlow, and returns its output and errors."""
    (folder / "tensorflow.py").write_text(tensorflow)
    environ = {name: value for name, value in os.environ.items() if "TF_" not in name}
    environ |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"} | variables
    done = starting.run(sys.executable, "-c", program, env=environ, code=None)
    return done.stdout.strip(), done.stderr


def noisy(module: str) -> str:
    return f"import os; os.write(2, b'notes'); {module}"


@pytest.mark.parametrize(
    ("level", "stderr"), [("", "and after"), ("2", "and after"), ("0", "notesand after")]
)
def test_only_start_up_messages_are_hidden_by_default(
    level: str, stderr: str, tmp_path: Path
) -> None:
    variables = {"TF_CPP_MIN_LOG_LEVEL": level} if level else {}
    module = noisy("level = os.environ['TF_CPP_MIN_LOG_LEVEL']")
    assert run(tmp_path, module, PROGRAM, **variables) == (level or "3", stderr)


def test_failing_start_shows_all_messages(tmp_path: Path) -> None:
    _, stderr = run(tmp_path, noisy("raise ImportError('no library')"), PROGRAM)
    assert stderr.startswith("notes")
    assert stderr.endswith("ImportError: no library\n")


NOTEBOOK = """
import sys
sys.ps1 = ">>> "  # as in notebooks
{before}
import tfdist
{after}
import tensorflow
print(tensorflow.get_logger().level)
"""
FAKE = """
import logging
def get_logger():
    return logging.getLogger("tensorflow")
if not get_logger().level:
    get_logger().setLevel(logging.INFO)
"""


@pytest.mark.parametrize(
    ("before", "after", "level"),
    [
        ("", "", "30"),
        ("import tensorflow", "", "30"),
        ("", "import tensorflow; tensorflow.get_logger().setLevel('INFO')", "20"),
        ("import os; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '0'", "", "20"),
        ("import tensorflow; tensorflow.get_logger().setLevel('DEBUG')", "", "10"),
        ("del sys.ps1", "", "20"),
    ],
)
def test_notebooks_show_no_information_unless_the_user_wants_it(
    before: str, after: str, level: str, tmp_path: Path
) -> None:
    assert run(tmp_path, FAKE, NOTEBOOK.format(before=before, after=after)) == (level, "")


def square(task: int, advance: parallel_tasks.Advance) -> tuple[int, int]:
    advance(1)
    return task * task, os.getpid()


def fail_at_three(task: int, advance: parallel_tasks.Advance) -> None:
    if task == 3:
        raise DataError("three")
    while True:  # until asked to stop
        advance(1)


def die(task: int, advance: parallel_tasks.Advance) -> None:
    os._exit(9)


def run_tasks(function: object, num_tasks: int, num_workers: int) -> list[object]:
    return parallel_tasks.run(
        function,  # type: ignore[arg-type]
        range(num_tasks),
        num_workers=num_workers,
        description="testing",
        num_records=num_tasks,
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_are_in_the_order_of_the_tasks(num_workers: int) -> None:
    results = run_tasks(square, 9, num_workers)
    assert [result for result, _ in results] == [i * i for i in range(9)]
    assert ({process for _, process in results} == {os.getpid()}) == (num_workers == 1)


def test_first_error_ends_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="three"):
        run_tasks(fail_at_three, 4, 4)


def test_dead_worker_is_reported() -> None:
    with pytest.raises(DataError, match=r"a worker process died.* smaller --num-workers"):
        run_tasks(die, 2, 2)


TASKS = """
from pipelines.console.parallel_tasks import run
from pipelines.console.quiet import quieten_tensorflow

if __name__ == "__main__":
    quieten_tensorflow()
    import task
    print(run(task.done, [1, 2], num_workers=2, description="", num_records=2))
"""


def test_tensorflow_is_silent_in_each_process(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TASKS)
    (tmp_path / "tensorflow.py").write_text("import os; os.write(2, b'notes')")
    (tmp_path / "task.py").write_text("import tensorflow\ndef done(task, advance): return task")
    environ = {name: value for name, value in os.environ.items() if "TF_CPP" not in name}
    environ |= {"PYTHONPATH": str(ROOT)}
    finished = starting.run(sys.executable, "program.py", cwd=tmp_path, env=environ, code=None)
    assert finished.stdout.strip() == "[1, 2]", finished.stderr
    assert "notes" not in finished.stderr
