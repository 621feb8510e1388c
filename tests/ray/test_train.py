"""Workers on a real Ray cluster of two nodes on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.cluster_utils import Cluster

from tests.support.starting import ENVIRON, SECONDS, command, piped, program, python
from tests.test_launch import gone
from tfdist.errors import TERMINATED


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """A cluster of a head without cores and two nodes with a core each, at its `address`."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    yield cluster
    cluster.shutdown()


def environ(cluster: Any) -> dict[str, str]:
    """Returns the environment of commands that connect to a cluster.

    An earlier `ray.init` of this process turns on authentication for all of its later clusters, by
    RAY_AUTH_MODE in the environment, which the commands need as well.
    """
    return {**os.environ, **ENVIRON, "RAY_ADDRESS": cluster.address}


@contextlib.contextmanager
def started(cluster: Any, folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Starts the launch command, and kills it at the end of the block or at its time-out."""
    line = command("--via", "ray", *flags)
    with piped(*line, cwd=folder, env=environ(cluster)) as process:
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()


def launched(cluster: Any, folder: Path, *flags: str) -> tuple[int, str, str]:
    """Runs the launch command; returns its exit code and its output."""
    with started(cluster, folder, *flags) as process:
        out, err = process.communicate(timeout=SECONDS)
        return process.returncode, out, err


#: Trains two epochs, and saves the weights.
TRAINS = """
import sys
import keras, numpy as np, tfdist

def build_model():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model

data = np.random.default_rng(0).normal(size=(21, 6)).astype("float32")
trainer = tfdist.Trainer(build_model, strategy=sys.argv[1])
trainer.fit(data[:, :5], data[:, 5:], batch_size=8, epochs=2, verbose=0)
print("rank", tfdist.rank(), "of", tfdist.size())
if tfdist.is_chief():
    np.savez(sys.argv[2], *trainer.model.get_weights())
"""


@pytest.mark.check
def test_two_workers_train_as_one_device(two_nodes: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    flags = ("--num-workers", "2", "--placement", "STRICT_SPREAD", "--")
    run = ("python", str(script), "multi_worker", "ray.npz")
    code, out, err = launched(two_nodes, tmp_path, *flags, *run)
    assert code == 0, out + err
    assert sorted(out.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    python(str(script), "one_device", "alone.npz", cwd=tmp_path)
    found, wanted = np.load(tmp_path / "ray.npz"), np.load(tmp_path / "alone.npz")
    for name in wanted.files:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6)


#: A worker that prints its rank, the number of workers and its process id, and saves nothing
#: when it is preempted.
WAITS = """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(138))
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
print("worker", rank, "of", len(workers), "process", os.getpid(), flush=True)
"""


def lines_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    """Reads standard output until a line contains a text."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if wanted in line:
            return lines
    pytest.fail(f"no line contains {wanted!r}: {lines}")


def workers_of(process: subprocess.Popen[str], number: int) -> list[int]:
    """Returns the process ids of running workers, in the order of their ranks."""
    words = [lines_until(process, "process")[-1].split() for _ in range(number)]
    assert {line[4] for line in words} == {str(number)}
    return [int(line[-1]) for line in sorted(words, key=lambda line: line[2])]


@pytest.mark.long
def test_killed_worker_is_named_and_followed_by_a_restart(two_nodes: Any, tmp_path: Path) -> None:
    path = program(tmp_path, f"{WAITS}\nif not pathlib.Path('again').exists(): time.sleep(600)")
    with started(two_nodes, tmp_path, "--max-restarts", "1", "--", "python", path) as process:
        killed = workers_of(process, 2)[1]
        (tmp_path / "again").touch()
        os.kill(killed, signal.SIGKILL)
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
    assert "rank 1 was the first to fail, with signal SIGKILL" in err
    assert "Restarting: restart 1 of 1 after failures" in err


@pytest.mark.long
def test_traceback_and_exit_code_of_a_worker_reach_the_caller(
    two_nodes: Any, tmp_path: Path
) -> None:
    body = """
if rank == 0:
    print("out", flush=True)
    pathlib.Path("printed").touch()
    time.sleep(600)
while not pathlib.Path("printed").exists(): time.sleep(0.05)
raise ValueError("no rows")
"""
    path = program(tmp_path, body)
    code, out, err = launched(two_nodes, tmp_path, "--", "python", path)
    assert (code, out) == (1, "[0] out\n")
    end = err.partition("error: ")[2]
    assert end.startswith("rank 1 was the first to fail, with exit code 1:\nTraceback (most")
    assert end.endswith("ValueError: no rows\n")


@pytest.mark.long
def test_lost_node_is_named(two_nodes: Any, tmp_path: Path) -> None:
    path = program(tmp_path, f"{WAITS}\ntime.sleep(600)")
    with started(two_nodes, tmp_path, "--", "python", path) as process:
        processes = workers_of(process, 2)
        two_nodes.remove_node(two_nodes.workers[1], allow_graceful=False)
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 75, err
    assert ": the Ray node" in err
    assert gone(processes)


@pytest.mark.long
def test_number_of_workers_follows_the_nodes(two_nodes: Any, tmp_path: Path) -> None:
    path = program(tmp_path, f"{WAITS}\nwhile not pathlib.Path('end').exists(): time.sleep(0.1)")
    flags = ("--elastic", "1:2", "--max-restarts", "3", "--", "python", path)
    with started(two_nodes, tmp_path, *flags) as process:
        workers_of(process, 2)
        two_nodes.remove_node(two_nodes.workers[1], allow_graceful=False)
        workers_of(process, 1)
        two_nodes.add_node(num_cpus=1)
        workers_of(process, 2)
        (tmp_path / "end").touch()
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
    assert "restart 1 of 3 after failures, 0 after preemptions" in err
    assert "restart 1 of 3 after failures, 1 after preemptions" in err


@pytest.mark.long
def test_no_process_outlives_the_launcher(two_nodes: Any, tmp_path: Path) -> None:
    path = program(tmp_path, f"{WAITS}\ntime.sleep(600)")
    for number, code in {signal.SIGUSR1: TERMINATED, signal.SIGKILL: -signal.SIGKILL}.items():
        with started(two_nodes, tmp_path, "--", "python", path) as process:
            processes = workers_of(process, 2)
            process.send_signal(number)
            _, err = process.communicate(timeout=SECONDS)
            assert process.returncode == code, err
        assert gone(processes)


@pytest.mark.long
def test_more_workers_than_the_cluster_has_raise(two_nodes: Any, tmp_path: Path) -> None:
    flags = ("--num-workers", "3", "--placement-timeout", "1", "--", "python", "-V")
    code, _, err = launched(two_nodes, tmp_path, *flags)
    assert code == 1
    assert "Cannot place 3 workers with 1 CPU each (PACK): the Ray cluster has 2 CPU" in err


@pytest.mark.long
def test_missing_program_raises(two_nodes: Any, tmp_path: Path) -> None:
    code, _, err = launched(two_nodes, tmp_path, "--", "no-such-program")
    assert code == 1
    assert "Cannot start 'no-such-program'" in err
