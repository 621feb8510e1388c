"""Run folders in a bucket have the files and metrics of local ones, and report what fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.support import ROOT, buckets
from tests.support.buckets import Fault, Proxy
from tests.support.commands import wait_for
from tests.support.starting import python
from tfdist import train
from tfdist.checkpoint import __main__ as checkpoint
from tfdist.checkpoint.store import store_at
from tfdist.console import folders
from tfdist.errors import ConfigurationError
from tfdist.run import mirror
from tfdist.tools.runs import __main__ as runs
from tfdist.tools.runs.folders import read_epochs

FLAGS = ["--recipe=recipes._template", "--strategy=one_device", "--verbose=0"]
FLAGS += ["--log-every=4"]  # the last one, because evaluation has no steps to log
PATH = {"PYTHONPATH": str(ROOT)}  # added to the environment, which names the server by then

#: Trains, and is killed as soon as the second checkpoint is in the bucket.
KILLED = """
import os, signal, sys
from tfdist import train
from tfdist.checkpoint.store import BucketStore

upload = BucketStore._upload

def upload_and_die(self, place):
    upload(self, place)
    if place.epoch == 2:
        os.kill(os.getpid(), signal.SIGKILL)

BucketStore._upload = upload_and_die
train.main(sys.argv[1:])
"""


@pytest.fixture
def url(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"{bucket}/runs"


def weights(file: Path) -> list[np.ndarray]:
    return keras.saving.load_model(file, compile=False).get_weights()


def metrics(lines: bytes) -> list[dict[str, float]]:
    """Returns the lines of `metrics.jsonl` without what depends on time."""
    timed = ("seconds", "examples_per_second", "data_wait_share", "peak_memory")
    epochs = [json.loads(line) for line in lines.splitlines()]
    return [{k: v for k, v in epoch.items() if k not in timed} for epoch in epochs]


def test_run_in_a_bucket_is_complete_and_can_be_listed(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS, "--epochs=1", f"--run-dir={url}/a", "--logger=csv,tensorboard"]
    assert train.main(flags) == 0
    root = buckets.remote(f"{url}/a")
    written = root.sizes()
    expected = {"config.yaml", "versions.json", "metrics.jsonl", "metrics.csv", "curves.png"}
    assert expected | {"model.keras"} <= set(written)
    assert any(name.startswith("tensorboard/") for name in written)
    assert not any(name.endswith(".lock") for name in written)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]

    capsys.readouterr()
    assert train.main(flags) == 1
    assert f"{url}/a already contains a run" in capsys.readouterr().err
    assert root.sizes() == written

    assert train.main([*FLAGS[:-1], f"--evaluate={url}/a/model.keras"]) == 0
    assert train.main([*FLAGS[:-1], f"--evaluate={url}/a"]) == 0
    assert checkpoint.main(["verify", f"{url}/a"]) == 0
    second = [*FLAGS, "--epochs=2", f"--run-dir={tmp_path / 'b'}"]
    assert train.main([*second, f"--resume={url}/a"]) == 0
    assert len(read_epochs(tmp_path / "b")) == 1

    capsys.readouterr()
    assert runs.main(["list", "--folder", url]) == 0
    listed = capsys.readouterr().out
    assert f"{url}/a\n" in listed
    assert "finished, 1 of 1 epochs" in listed
    assert runs.main(["compare", "a", str(tmp_path / "b"), "--folder", url]) == 0
    assert runs.main(["clean", "a", "--folder", url, "--yes"]) == 0
    assert not root.sizes()


def test_killed_run_resumes_with_the_metrics_and_weights_of_a_local_run(
    url: str, proxy: Proxy, tmp_path: Path
) -> None:
    flags = [*FLAGS, "--epochs=3"]
    location = f"--run-dir={url}/a"
    python("-c", KILLED, *flags, location, code=-signal.SIGKILL, env=os.environ | PATH)
    root = buckets.remote(f"{url}/a")
    assert "model.keras" not in root.sizes()
    assert len(store_at(f"{url}/a/checkpoints").places()) == 2

    # In new processes, as a user does it: Keras draws seeds of initializers from Python's random
    # numbers, of which threads that other tests of this process have started may draw some.
    for options in ([location, "--resume=auto"], [f"--run-dir={tmp_path / 'local'}"]):
        python("-m", "tfdist.train", *flags, *options, env=os.environ | PATH)
    local = (tmp_path / "local" / "metrics.jsonl").read_bytes()
    assert metrics((root / "metrics.jsonl").read_bytes()) == metrics(local)
    (root / "model.keras").download(tmp_path / "model.keras")
    local_weights = weights(tmp_path / "local" / "model.keras")
    np.testing.assert_equal(weights(tmp_path / "model.keras"), local_weights)


def refusing_writes(part: str) -> Callable[[str, str], Fault]:
    """Returns a function that refuses writes to paths that contain a text."""
    return lambda method, path: "403" if method in ("PUT", "POST") and part in path else ""


@pytest.mark.parametrize(
    ("refused", "message"),
    [("/runs/a/", "permission denied"), ("/runs/a/config.yaml", "config.yaml: permission denied")],
)
def test_bucket_that_refuses_writes_stops_the_run_before_it_trains(
    url: str, proxy: Proxy, capsys: pytest.CaptureFixture[str], refused: str, message: str
) -> None:
    proxy.fault = refusing_writes(refused)
    assert train.main([*FLAGS, "--epochs=1", f"--run-dir={url}/a"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{url}/a" in line
    assert message in line
    assert "grant them s3:PutObject" in line
    proxy.fault = lambda method, path: ""
    assert not buckets.remote(url).sizes()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("s3://no-such-bucket/a", "there is no such bucket"),
        ("s3://", "expected a local folder or the URL of one in an object store"),
        ("hf://datasets/a", "expected a local folder or the URL of one in an object store"),
    ],
)
def test_location_that_cannot_be_written_is_refused(
    proxy: Proxy, capsys: pytest.CaptureFixture[str], location: str, message: str
) -> None:
    assert train.main([*FLAGS, "--epochs=1", f"--run-dir={location}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert location in line
    assert message in line


def test_files_in_the_bucket_outlive_a_removed_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = mirror.Mirror("memory://bucket/removed-cache", 0, lambda: None)
    run.open([])
    (run.local / "metrics.jsonl").write_text("{}")
    run.upload()
    shutil.rmtree(run.local)
    with pytest.raises(OSError, match="was removed during the run"):
        run.upload()
    with pytest.raises(ConfigurationError, match="was removed during the run"):
        run.finish()
    assert buckets.remote("memory://bucket/removed-cache").sizes() == {"metrics.jsonl": 2}


def test_model_that_cannot_be_uploaded_is_kept_and_reported(
    url: str, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.fault = refusing_writes("model.keras")
    assert train.main([*FLAGS, "--epochs=1", f"--run-dir={url}/a"]) == 1
    error = capsys.readouterr().err
    assert f"{url}/a/model.keras: permission denied" in error
    left = folders.not_uploaded_folder(f"{url}/a")
    assert str(left) in error
    assert weights(left / "model.keras")
    assert "metrics.jsonl" in buckets.remote(f"{url}/a").sizes()


def test_files_are_uploaded_while_a_run_trains(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mirror, "_SECONDS", 0.01)
    copy = mirror.Mirror(url, 0, lambda: None)
    copy.open(())
    (copy.local / "a.txt").write_text("1")
    refusals: list[str] = []

    def refuse_once(method: str, path: str) -> Fault:
        if method == "PUT" and not refusals:
            refusals.append(path)
            return "403"
        return ""

    proxy.fault = refuse_once
    copy.start()
    wait_for((buckets.remote(url) / "a.txt").is_file)
    assert refusals
    assert "a.txt: permission denied" in capsys.readouterr().err
    (copy.local / "a.txt").write_text("12")
    (copy.local / "b.txt").write_text("")
    copy.finish()
    assert buckets.remote(url).sizes() == {"a.txt": 2, "b.txt": 0}
    assert not copy.local.exists()
