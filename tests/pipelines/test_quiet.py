"""TensorFlow's start-up messages are hidden, shown with a module that prints like TensorFlow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

PROGRAM = """
from pipelines.quiet import quieten_tensorflow
quieten_tensorflow()
import os, tensorflow
os.write(2, b"and after")
print(tensorflow.level)
"""


def run(folder: Path, module: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "tensorflow.py").write_text(f"import os; os.write(2, b'notes'); {module}")
    environ = {name: value for name, value in os.environ.items() if "TF_CPP" not in name}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("level", "said"), [("", "and after"), ("2", "and after"), ("0", "notesand after")]
)
def test_only_the_start_is_silent_unless_the_user_wants_it(
    level: str, said: str, tmp_path: Path
) -> None:
    variables = {"TF_CPP_MIN_LOG_LEVEL": level} if level else {}
    done = run(tmp_path, "level = os.environ['TF_CPP_MIN_LOG_LEVEL']", **variables)
    assert (done.stdout.strip(), done.stderr) == (level or "3", said)


def test_failing_start_shows_all_messages(tmp_path: Path) -> None:
    done = run(tmp_path, "raise ImportError('no library')")
    assert done.stderr.startswith("notes")
    assert done.stderr.endswith("ImportError: no library\n")
