"""Functions on workers of a real Ray cluster: results, errors, and trials of Ray Tune."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import tfdist.ray
from tests.support import starting
from tfdist.errors import ConfigurationError, LaunchError

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=3, log_to_driver=False)
    yield
    ray.shutdown()


def test_returns_result_and_output_of_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(first: int, *, second: int) -> int:
        print("rank", tfdist.rank(), flush=True)
        return first + second * tfdist.size()

    assert tfdist.ray.train(fn, 2, args=(1,), kwargs={"second": 10}) == 21
    assert capsys.readouterr().out == "rank 0\n"


def test_error_contains_the_traceback_of_the_rank() -> None:
    def fn() -> None:
        if tfdist.rank() == 1:
            raise ValueError("batch without rows")
        import time

        time.sleep(600)

    with pytest.raises(LaunchError, match="rank 1 was the first to fail") as error:
        tfdist.ray.train(fn)
    assert "ValueError: batch without rows" in str(error.value)


def test_restart_after_a_failure(tmp_path: Path) -> None:
    def fn() -> str:
        if tfdist.rank() == 1 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise ValueError("once")
        return "done"

    assert tfdist.ray.train(fn, 2, max_restarts=1) == "done"


def test_contradictory_numbers_of_workers_raise() -> None:
    with pytest.raises(ConfigurationError, match="min_workers=3"):
        tfdist.ray.train(print, 2, min_workers=3, max_restarts=1)
    with pytest.raises(ConfigurationError, match="needs max_restarts"):
        tfdist.ray.train(print, 2, min_workers=1)


#: Two trials, each with two workers; Ray Tune stops the first trial early.
TRIALS = """
import json, pathlib, sys
import ray
from ray import tune
import tfdist.ray

def fn(rate):
    import keras, numpy as np, pathlib, tempfile, tfdist, tfdist.ray

    def build_model():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse")
        return model

    x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
    trainer = tfdist.Trainer(build_model, strategy="multi_worker")
    report = tfdist.ray.ReportCallback()
    trainer.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[report])
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "rate").write_text(str(rate))
        tfdist.ray.report({"epoch": 3, "loss": 0.0}, checkpoint=folder)

def trial(config):
    tfdist.ray.train(fn, 2, args=(config["rate"],))

ray.init(address="local", num_cpus=3)
with_workers = tune.with_resources(trial, tfdist.ray.trial_resources(2))
tuner = tune.Tuner(
    with_workers,
    param_space={"rate": tune.grid_search([0.1, 0.2])},
    run_config=tune.RunConfig(
        storage_path=sys.argv[1], stop=lambda name, last: last["epoch"] == 1 and name.endswith("0")
    ),
)
found = [
    (one.config["rate"], list(one.metrics_dataframe["epoch"]), list(one.metrics_dataframe["loss"]),
     one.checkpoint and pathlib.Path(one.checkpoint.path, "rate").read_text())
    for one in tuner.fit()
]
print("found", json.dumps(found))
"""


def test_trials_report_to_ray_tune_which_can_stop_them(tmp_path: Path) -> None:
    script = tmp_path / "trials.py"
    script.write_text(TRIALS)
    done = starting.run(sys.executable, str(script), str(tmp_path / "results"), cwd=tmp_path)
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("found "))
    (first, epochs, _, checkpoint), (second, all_epochs, losses, kept) = json.loads(line[6:])
    assert (first, epochs, checkpoint) == (0.1, [0, 1], None)
    assert (second, all_epochs, kept) == (0.2, [0, 1, 2, 3], "0.2")
    assert losses == sorted(losses, reverse=True)
