"""Parallel tasks return results in order, keep errors, and leave no process behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pipelines import DataError
from pipelines.console import parallel_tasks
from tests.support import ROOT, starting


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


def run(function: object, num_tasks: int, num_workers: int) -> list[object]:
    return parallel_tasks.run(
        function,  # type: ignore[arg-type]
        range(num_tasks),
        num_workers=num_workers,
        description="testing",
        num_records=num_tasks,
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_are_in_the_order_of_the_tasks(num_workers: int) -> None:
    results = run(square, 9, num_workers)
    assert [result for result, _ in results] == [i * i for i in range(9)]
    assert ({process for _, process in results} == {os.getpid()}) == (num_workers == 1)


def test_first_error_ends_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="three"):
        run(fail_at_three, 4, 4)


def test_dead_worker_is_reported() -> None:
    with pytest.raises(DataError, match=r"a worker process died.* smaller --num-workers"):
        run(die, 2, 2)


PROGRAM = """
from pipelines.console.parallel_tasks import run
from pipelines.console.quiet import quieten_tensorflow

if __name__ == "__main__":
    quieten_tensorflow()
    import task
    print(run(task.done, [1, 2], num_workers=2, description="", num_records=2))
"""


def test_tensorflow_is_silent_in_each_process(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tensorflow.py").write_text("import os; os.write(2, b'notes')")
    (tmp_path / "task.py").write_text("import tensorflow\ndef done(task, advance): return task")
    environ = {name: value for name, value in os.environ.items() if "TF_CPP" not in name}
    environ |= {"PYTHONPATH": str(ROOT)}
    finished = starting.run(sys.executable, "program.py", cwd=tmp_path, env=environ, code=None)
    assert finished.stdout.strip() == "[1, 2]", finished.stderr
    assert "notes" not in finished.stderr
