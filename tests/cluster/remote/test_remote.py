"""Training on devices of two server processes, by a process that is connected to them."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.cluster.remote import servers
from tests.conformance import results
from tests.conformance.cases import CASES
from tests.conformance.layouts import AnsweringPool, Layout, values_of
from tests.support.starting import python
from tfdist.cluster.networks import free_ports
from tfdist.cluster.remote import __main__ as command
from tfdist.cluster.remote import connection, heartbeat, probe
from tfdist.devices import resolve
from tfdist.errors import PEER_LOST, ClusterError, ConfigurationError, DeviceError

pytestmark = pytest.mark.xdist_group("remote")


def answering() -> Callable[..., Any]:
    """Runs in the connected process: returns a function that calls one of this module."""
    resolve(list(servers.devices(2)), 1)
    return lambda name, *arguments: globals()[name](*arguments)


@pytest.fixture(scope="module")
def client() -> Iterator[AnsweringPool]:
    pool = AnsweringPool(Layout("pipeline", 1, via=""), answering)
    yield pool
    pool.stop()


def asked(client: AnsweringPool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function of this module returns in the connected process."""
    return values_of(client.ask(function.__name__, *arguments))[0]


def stale_reads(num_elements: int, tries: int) -> int:
    """Assigns to a variable on a server and reads it in a function; counts the older values."""
    import tensorflow as tf

    (device,) = resolve(list(servers.devices(2))[:1], 1)
    with tf.device(device):
        variable = tf.Variable(tf.zeros([num_elements]))
    read = tf.function(lambda: variable.read_value()[0] + 0.0)
    stale = 0
    for number in range(tries):
        variable.assign(tf.fill([num_elements], float(number)))
        stale += int(read().numpy() != number)
    return stale


def differences(strategy: str, name: str) -> list[str]:
    """Returns how the results of a case differ from those of plain Keras on one device."""
    from tests.conformance import engines

    case = CASES[name]
    result = engines.tfdist(case, strategy, 2)
    return [*map(str, results.compare(result, engines.one_device(case), case))]


def weights_of_stages() -> tuple[list[str], dict[str, str]]:
    """Returns the devices of weights and optimizer state, and the table at the start."""
    import keras

    import tfdist

    def build() -> keras.Model:
        layers = [keras.layers.Dense(8), keras.layers.Dense(8)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("adam", "mse")
        return model

    trainer = tfdist.Trainer(build, strategy="pipeline", devices=list(servers.devices(2)))
    trainer.fit(np.zeros((4, 8)), np.zeros((4, 8)), verbose=0)
    variables = trainer.model.variables + trainer.model.optimizer.variables
    placed = [connection.short(v.value.device) for v in variables if v.shape.rank]
    return placed, trainer.strategy.describe()


def error_of_python_function() -> float:
    """Predicts with a layer that calls Python; returns the largest error of an output."""
    import keras
    import tensorflow as tf

    import tfdist

    def doubled(x: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(lambda y: 2 * y, [x], x.dtype), x.shape)

    def build() -> keras.Model:
        hidden = keras.layers.Lambda(doubled, output_shape=(4,))
        model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    trainer = tfdist.Trainer(build, strategy="pipeline", devices=list(servers.devices(2)))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    kernel, bias = trainer.model.get_weights()
    return float(np.abs(trainer.predict(x, verbose=0) - (2 * x @ kernel + bias)).max())


def train_on_mesh(folder: str) -> tuple[int, list[int]]:
    """Runs the training command; returns its exit code and how often it printed each device."""
    from tfdist import train

    devices = servers.devices(2)
    flags = ["--mesh", "pipeline=2", "--devices", ",".join(devices), "--data", "synthetic"]
    with redirect_stdout(StringIO()) as out:
        code = train.main(["--model", "mlp", *flags, "--smoke", "--run-dir", folder])
    return code, [out.getvalue().count(device) for device in devices]


def messages() -> list[str]:
    """Returns the messages of what is refused in the connected process."""
    from tfdist import strategies
    from tfdist.errors import TfdistError

    here, there = servers.devices(2)
    results = []
    for name, devices in (
        ("mirrored", [here, there]),
        ("towers", [here, here]),
        ("towers", [here, there.replace("CPU:0", "CPU:7")]),
        ("towers", [here, "localhost:1/CPU:0"]),
    ):
        try:
            strategies.create(name, devices)
            results.append("not refused")
        except TfdistError as error:
            results.append(str(error))
    return results


def test_functions_read_what_was_assigned_before(client: AnsweringPool) -> None:
    """With the streaming that is TensorFlow's default, 23 of 40 reads were stale here."""
    assert asked(client, stale_reads, 1_000_000, 40) == 0


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ("pipeline on servers", "embedding-clipped"),
        ("tensor_parallel on servers", "accumulate-clipped"),
        ("sharded parameters on servers", "dropout"),
    ],
)
def test_matches_one_device(client: AnsweringPool, strategy: str, name: str) -> None:
    assert asked(client, differences, strategy, name) == []


def test_command_trains_on_a_mesh_of_named_devices(client: AnsweringPool, tmp_path: Path) -> None:
    # The start-up table shows each device in the list of all devices, and beside its stage.
    assert asked(client, train_on_mesh, str(tmp_path)) == (0, [2, 2])
    assert "val_loss" in (tmp_path / "metrics.jsonl").read_text()


def test_each_stage_is_on_its_server(client: AnsweringPool) -> None:
    placed, table = asked(client, weights_of_stages)
    first, second = sorted(set(placed))
    # Two weights and two slots of the optimizer for each, of two layers of equal size.
    assert [placed.count(first), placed.count(second)] == [6, 6]
    stages = sorted(table[f"stage {number}"].rpartition("on ")[2] for number in range(2))
    assert stages == [first, second]


def test_refuses_what_servers_cannot_do(client: AnsweringPool) -> None:
    mirrored, twice, number, other = asked(client, messages)
    assert "'mirrored' cannot use devices of other hosts" in mirrored
    assert "different names" in twice
    assert "No device" in number
    assert "CPU:7" in number
    assert "connects one once" in other


def test_python_functions_stay_in_the_training_process(client: AnsweringPool) -> None:
    assert asked(client, error_of_python_function) < 1e-5


def test_server_that_is_gone_is_named() -> None:
    address = f"localhost:{free_ports(1)[0]}"
    lost = heartbeat.first_lost([address])
    assert lost is not None
    assert f"Device server {address} is gone" in str(lost)
    assert "a second training" in str(lost)  # a frequent reason
    with pytest.raises(ClusterError, match=f"No device server answers at {address}"):
        heartbeat.wait_for([address], 0)


def test_server_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system accepts connections to a stopped process, which sends nothing."""
    import socket

    monkeypatch.setattr(probe, "_ANSWER_SECONDS", 0.1)
    with socket.create_server(("localhost", 0)) as silent:
        lost = heartbeat.first_lost([f"localhost:{silent.getsockname()[1]}"])
    assert lost is not None
    assert "has not answered" in lost.reason


def run_with_a_lost_server(code: str, expected: int, device: str = "", **options: Any) -> None:
    """Runs a program whose argument is a server that does not run, and checks that it says so."""
    address = f"localhost:{free_ports(1)[0]}"
    done = python("-c", code, f"{address}{device}", code=expected, **options)
    assert f"Device server {address} is gone" in done.stdout + done.stderr


def test_heartbeat_reports_the_loss_from_its_process() -> None:
    code = (
        "import queue, sys; from tfdist.cluster.remote.heartbeat import Heartbeat; "
        "q = queue.Queue(); h = Heartbeat(sys.argv[1:], 75); h.on_loss = q.put; h.listen(); "
        "print(q.get(timeout=60))"
    )
    run_with_a_lost_server(code, 0)


def test_server_that_is_lost_while_connecting_ends_the_process() -> None:
    """TensorFlow waits for it without a time limit."""
    code = (
        "import sys; from tfdist.cluster.remote import connection; "
        "connection.wait_for = lambda servers: None; connection.resolve(sys.argv[1:])"
    )
    run_with_a_lost_server(code, 75, "/CPU:0")


def test_server_that_is_lost_while_the_model_is_built_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tensorflow as tf

    import tfdist

    heart = SimpleNamespace(lost=None, on_loss=None)
    monkeypatch.setattr(connection, "heartbeat", lambda: heart)
    at_exit: list[Callable[..., Any]] = []
    monkeypatch.setattr(atexit, "register", lambda function, *_: at_exit.append(function))

    def build() -> NoReturn:
        heart.lost = probe.Lost("host-b:2222", "is gone")
        raise tf.errors.UnavailableError(None, None, "Connection reset by peer")

    with pytest.raises(ClusterError, match="Device server host-b:2222 is gone") as caught:
        tfdist.Trainer(build, strategy="one_device")
    assert caught.value.exit_code == PEER_LOST
    assert gc.freeze in at_exit  # the process ends at once


def test_process_whose_python_is_blocked_ends_with_the_exit_code() -> None:
    """As calls of TensorFlow do that wait for a stopped server."""
    code = (
        "import ctypes, sys; from tfdist.cluster.remote import heartbeat; "
        "heartbeat.Heartbeat(sys.argv[1:], 75).listen(); "
        "ctypes.PyDLL(None).sleep(100)"  # unlike CDLL, it keeps the lock of the interpreter
    )
    run_with_a_lost_server(code, 75, timeout=90)


def test_refuses_public_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    command._check_private(["10.0.0.1", "192.168.1.1", "fe80::1"], public=False)
    with pytest.raises(ConfigurationError, match=r"8\.8\.8\.8 of this host is a public address"):
        command._check_private(["10.0.0.1", "8.8.8.8"], public=False)
    command._check_private(["8.8.8.8"], public=True)
    assert "anyone who reaches 8.8.8.8" in capsys.readouterr().err


def test_names() -> None:
    assert connection.names_remote("host-b:2222/GPU:0")
    assert connection.names_remote(["CPU:0", "10.0.0.1:2222/device:cpu:1"])
    assert not connection.names_remote(["CPU:0", "/device:GPU:1", "/job:localhost/device:CPU:0"])
    assert not connection.names_remote(2)
    # In a process without servers all names stay as they are.
    assert connection.on_this_host("CPU:0") == "CPU:0"
    assert connection.short("/job:localhost/replica:0/task:0/device:CPU:0") == "CPU:0"


def test_full_names_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_servers", ["host-a:2222"])
    assert connection.on_this_host("CPU:0") == "/job:localhost/replica:0/task:0/device:CPU:0"
    for name in ("CPU:0", "GPU:1"):
        full = f"/job:device_server/replica:0/task:0/device:{name}"
        assert connection.on_this_host(full) == full


def test_divides_names_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfdist import cluster, devices

    second = cluster.Cluster(rank=1, size=2, source="test")
    monkeypatch.setattr(cluster, "started_together", lambda: second)
    monkeypatch.setattr(connection, "resolve", lambda names: list(names))
    names = [f"host-{number}:2222/GPU:0" for number in range(4)]
    assert devices.resolve(names, 1) == names[2:]
    with pytest.raises(DeviceError, match="cannot be divided over 2 processes"):
        devices.resolve(names[:3], 1)
    with pytest.raises(DeviceError, match="would use the device server host-1:2222, but"):
        devices.resolve([*names[:2], "CPU:0", "host-1:2222/GPU:1"], 1)


def test_mesh_counts_names_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfdist import cluster, strategies

    second = cluster.Cluster(rank=1, size=2, source="test")
    monkeypatch.setattr(cluster, "started_together", lambda: second)
    names = [f"host-{number}:2222/GPU:0" for number in range(4)]
    result = strategies._on_mesh("data=2,pipeline=2", None, names, {})
    assert result[:2] == ("pipeline", names)
    with pytest.raises(ConfigurationError, match="has 2 devices in each of 2 processes, but"):
        strategies._on_mesh("data=2,pipeline=2", None, names[:2], {})
    # Names without a host are those of each process.
    result = strategies._on_mesh("data=2,pipeline=2", None, ["CPU:0", "CPU:1"], {})
    assert result[1] == ["CPU:0", "CPU:1"]


def memory(strategy: str) -> tuple[float, float]:
    """Trains a large model; returns the megabytes by which this process grew, and of the model."""
    import keras

    import tfdist

    def build() -> keras.Model:
        layers = [keras.layers.Dense(3000, activation="relu") for _ in range(12)]
        model = keras.Sequential([keras.Input((3000,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def megabytes(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(key)) / 1e3

    before = megabytes("VmRSS")
    trainer = tfdist.Trainer(build, strategy=strategy, devices=list(servers.devices(2)))
    trainer.fit(np.zeros((8, 3000)), np.zeros((8, 1)), batch_size=8, verbose=0)
    return megabytes("VmHWM") - before, trainer.model.count_params() * 4 / 1e6


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["pipeline", "sharded"])
def test_training_process_does_not_hold_the_model(strategy: str) -> None:
    pool = AnsweringPool(Layout(strategy, 1, via=""), answering)
    try:
        grown, size = asked(pool, memory, strategy)
    finally:
        pool.stop()
    assert grown < 0.75 * size
