"""TensorFlow's start-up messages are hidden, shown with a module that prints like TensorFlow."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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
