"""Plain Keras scripts print the same metrics after only their `trainer = model` line changed.

Each script runs as it is, and then with a `Trainer` under `tfdist.launch` and mpirun, in one
process and on two devices.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.examples.test_examples import MPIRUN, output_of
from tests.support.commands import needs_horovod

pytestmark = [pytest.mark.processes, needs_horovod]

SCRIPTS = Path(__file__).parent / "scripts"
LAUNCH = [sys.executable, "-m", "tfdist.launch", "--num-workers", "2"]
#: The arguments of `Trainer`, and the command before the script.
FORMS = {
    "launch": ("model", LAUNCH),
    "mpirun": ("model", [*MPIRUN, sys.executable]),
    "one process": ("model", [sys.executable]),
    "two devices": ("model, devices=2", [sys.executable]),
}
#: Those of `make check`. Without several processes, the conformance cases cover a `Trainer`.
OVER_PROCESSES = ("launch", "mpirun")


def metrics(command: list[str], folder: Path) -> list[str]:
    """Runs a script, and returns the metrics that rank 0 prints, or every rank alike."""
    output = output_of(*command, cwd=folder).splitlines()
    lines = [line.partition("metric")[2] for line in output if "metric" in line]
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("texts", OVER_PROCESSES),
        *(
            pytest.param(name, tuple(FORMS), marks=pytest.mark.long)
            for name in ("texts", "images", "tables")
        ),
    ],
)
def test_metrics_stay_the_same(name: str, forms: Sequence[str], tmp_path: Path) -> None:
    plain = (SCRIPTS / f"{name}.py").read_text()
    expected = metrics([sys.executable, str(SCRIPTS / f"{name}.py")], tmp_path)
    assert len(expected) > 3
    for form in forms:
        arguments, command = FORMS[form]
        folder = tmp_path / form.replace(" ", "-")
        folder.mkdir()
        text = plain.replace("trainer = model", f"trainer = tfdist.Trainer({arguments})")
        assert text.count("tfdist.Trainer") == 1
        (folder / "script.py").write_text(
            text.replace("import keras\n", "import keras\nimport tfdist\n", 1)
        )
        assert metrics([*command, "script.py"], folder) == expected, form
