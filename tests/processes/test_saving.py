"""What workers save, and a cluster of one worker."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import pytest

from tests.conformance import engines, results
from tests.conformance.cases import CASES
from tests.conformance.layouts import Group, Layout
from tests.support import starting

pytestmark = pytest.mark.processes

_SCRIPT = """
import sys
from pathlib import Path
import numpy as np, keras, tfdist

def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

folder = Path(sys.argv[1])
trainer = tfdist.Trainer(build, strategy="multi_worker")
trainer.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, epochs=2, verbose=2)
trainer.save(folder / "saved.keras")
assert (folder / "saved.keras").exists(), "save returned before the file was written"
trainer.model.save(folder / "plain.keras")
trainer.model.save_weights(folder / "plain.weights.h5")
try:
    trainer.save(folder / "missing" / "x.keras")
except tfdist.errors.ConfigurationError as error:
    assert "Cannot write" in str(error), error
else:
    raise AssertionError("saving to a missing folder did not fail")
"""


def test_only_rank_0_writes_and_shows_progress(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    line = starting.command("--num-workers=2", "--", sys.executable, str(script), str(tmp_path))
    done = starting.run(*line, cwd=tmp_path)
    output = done.stdout + done.stderr
    for name in ("saved.keras", "plain.keras"):
        assert keras.models.load_model(tmp_path / name).count_params() == 3
    assert (tmp_path / "plain.weights.h5").exists()
    assert output.count("Epoch 1/2") == 1
    logs = "".join(path.read_text() for path in tmp_path.rglob("rank-1.log"))
    assert "Epoch 1/2" not in logs
    assert "rank 1: model.save(" in output + logs


@pytest.mark.parametrize("via", ["", "processes"])
def test_single_worker_matches_one_device(via: str) -> None:
    layout = Layout("multi_worker", 1, num_devices=2, via=via)
    with Group(layout) as group:
        for name in ("uneven-batches", "embedding"):
            expected = engines.expected(name)
            differences = results.compare(group.train(layout, name), expected, CASES[name])
            assert not differences, "\n".join(map(str, differences))
