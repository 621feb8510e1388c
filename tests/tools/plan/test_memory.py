"""The memory plan: small graphs computed by hand, and the command."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import tensorflow as tf

from tests.support.training import FIT, build
from tfdist.config import TrainConfig
from tfdist.console import units
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.memory import graph, liveness, optimizer_state
from tfdist.memory.graph import Operation
from tfdist.memory.liveness import Allocator
from tfdist.strategies.sharded.plan import bytes_by_device
from tfdist.tools.plan import __main__ as plan
from tfdist.tools.plan import auto
from tfdist.tools.plan.cards import Card
from tfdist.tools.plan.devices import ReplicaPlanner, ReplicatedStep
from tfdist.tools.plan.exchange import Link
from tfdist.tools.plan.network import Network
from tfdist.tools.plan.programs import Program
from tfdist.trainer import Trainer

KB = 1 << 10


def test_allocator_does_not_split_slightly_larger_chunks() -> None:
    allocator = Allocator()
    first = allocator.allocate(1000 * KB)
    allocator.allocate(1)
    assert allocator.in_use == 1000 * KB + 256
    allocator.free(first)
    again = allocator.allocate(600 * KB)
    assert again == first  # less than twice as large: not split
    allocator.free(again)
    assert allocator.allocate(400 * KB).size == 400 * KB
    assert allocator.peak == 1000 * KB + 256


def test_allocator_merges_free_chunks() -> None:
    allocator = Allocator()
    chunks = [allocator.allocate(512 * KB) for _ in range(3)]
    for chunk in (chunks[0], chunks[2], chunks[1]):
        allocator.free(chunk)
    assert allocator.in_use == 0
    assert allocator.allocate(2048 * KB).start == chunks[0].start


def test_tensors_live_until_their_last_reader() -> None:
    size = 256 * KB
    operations = {
        "x": Operation("Conv2D", [], [], [size]),
        "seen": Operation("Reshape", [("x", 0)], [], [size], alias=True),
        "over": Operation("Relu", [("seen", 0)], [], [size], in_place=True),
        "kept": Operation("Conv2D", [("over", 0)], [], [size]),
        "last": Operation("Relu", [("kept", 0)], [], [size], in_place=True),
        "both": Operation("MatMul", [("over", 0), ("last", 0)], ["last"], [4]),
    }
    order = graph.execution_order(operations)
    assert liveness.peaks(operations, order, {"": []})[""] == (2 * size + 256, "both")
    held = liveness.peaks(operations, order, {"": [size, size]})[""]
    assert held.num_bytes == 4 * size + 256


def test_devices_hold_copies_of_remote_tensors() -> None:
    size = 256 * KB
    operations = {
        "weight": Operation("ReadVariableOp", [], [], [size], uncounted=True, device="a"),
        "x": Operation("Conv2D", [("weight", 0)], [], [size], device="a"),
        "y": Operation("MatMul", [("x", 0), ("weight", 0)], [], [4], device="b"),
        "z": Operation("MatMul", [("x", 0), ("y", 0)], [], [4], device="b"),
    }
    moved = graph.with_transfers(operations)
    result = liveness.peaks(moved, graph.execution_order(moved), {"a": [size], "b": []})
    assert result["a"].num_bytes == 2 * size
    assert result["b"].num_bytes == 2 * size + 256  # copies of x and weight, and y
    one = graph.on_one_device(operations)
    together = liveness.peaks(one, graph.execution_order(one), {"": [size]})
    assert together[""].num_bytes == 2 * size + 2 * 256


def test_the_next_batch_is_on_the_devices_that_read_it() -> None:
    operations = {
        "batch": Operation("IteratorGetNext", [], [], [8, 4], device="a"),
        "x": Operation("MatMul", [("batch", 0)], [], [2], device="a"),
        "y": Operation("MatMul", [("batch", 0), ("batch", 1), ("x", 0)], [], [2], device="b"),
    }
    ahead = graph.batch_on_devices(graph.with_transfers(operations))
    assert {device: sum(sizes) for device, sizes in ahead.items()} == {"a": 8, "b": 12}


def test_texts_that_are_split_in_the_model_are_refused() -> None:
    split = tf.function(lambda texts: tf.strings.split(texts).values)
    traced = split.get_concrete_function(tf.TensorSpec([2], tf.string)).graph
    with pytest.raises(UnsupportedModelError, match="Split texts in the data set"):
        graph.operations(traced)


@pytest.mark.parametrize(
    ("equation", "copies"),
    [("abcd,aecd->acbe", 2), ("acbe,aecd->abcd", 2), ("abc,cd->abd", 0), ("bij,bjk->bik", 0)],
)
def test_einsum_copies_what_it_transposes(equation: str, copies: int) -> None:
    """Of attention: two inputs have the heads behind the tokens, or one and the output."""
    left, right = equation.partition("->")[0].split(",")

    @tf.function
    def product(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Einsum(inputs=[one, other], equation=equation)

    specs = [tf.TensorSpec([2 + ord(axis) - ord("a") for axis in names]) for names in (left, right)]
    traced = graph.operations(product.get_concrete_function(*specs).graph)
    (einsum,) = (one for one in traced.values() if one.kind == "Einsum")
    assert len(einsum.sizes) == 1 + copies


@pytest.fixture(scope="module")
def step() -> ReplicatedStep:
    return ReplicatedStep(Network("mlp", (512,), 8, settings={"units": (1024, 1024)}))


def test_variables_are_counted(step: ReplicatedStep) -> None:
    weights = 4 * (512 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 8 + 8)
    (one,) = ReplicaPlanner(step, "one_device", 4).devices(64)
    assert one.weights == one.gradients == weights
    assert 2 * weights <= one.optimizer <= 2 * weights + 64
    assert one.total >= 4 * weights
    replica, server = ReplicaPlanner(step, "parameter_server", 4).devices(64)
    assert (replica.optimizer, server.activations) == (0, 0)
    assert server.weights == weights


def test_largest_batch_fits_and_the_next_does_not(step: ReplicatedStep) -> None:
    capacity = 64 << 20
    mirrored = ReplicaPlanner(step, "mirrored", 4)
    largest = mirrored.largest_batch(capacity)
    assert largest % 4 == 0
    assert mirrored.devices(largest)[0].total <= capacity
    assert mirrored.devices(largest + 4)[0].total > capacity
    assert ReplicaPlanner(step, "one_device", 4).largest_batch(1 << 20) == 0


def test_command_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "memory.csv"
    step = "memory --model cnn --input 16,16,3 --batch-size 64 --devices 2"
    line = f"{step} --precision mixed_float16 --card 4GB"
    assert plan.main([*line.split(), "--table", str(table)]) == 0
    assert "global batch of 64" in capsys.readouterr().out
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["strategy"] for row in rows} >= {"one_device", "mirrored", "parameter_server"}
    assert int(rows[0]["largest batch"]) > 64


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("pipeline", ["stage 1", "stage 2"]),
        pytest.param("tensor_parallel", ["device 1", "device 2"], marks=pytest.mark.long),
        pytest.param("sharded", ["device 1", "device 2"], marks=pytest.mark.long),
    ],
)
def test_command_plans_split_models(strategy: str, devices: list[str], tmp_path: Path) -> None:
    table = tmp_path / "memory.csv"
    line = "memory --model mlp --input 64 --classes 10 --batch 30 --devices 2 --set units=[512]"
    line += f" --strategy {strategy} --shard parameters --micro-batches 2 --card 2GB"
    assert plan.main([*line.split(), "--table", str(table)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["device"] for row in rows] == devices
    alone = 4 * (64 * 512 + 512 + 512 * 10 + 10)
    assert sum(units.num_bytes(row["weights"]) for row in rows) == pytest.approx(alone, rel=0.02)
    assert int(rows[0]["largest batch"]) > 30


def test_activations_of_a_pipeline_follow_its_order(tmp_path: Path) -> None:
    results = {}
    for order in ("gpipe", "1f1b", "interleaved", "zb"):
        table = tmp_path / f"{order}.csv"
        line = "memory --model mlp --input 64 --classes 10 --batch 8000 --devices 2"
        line += " --set units=[128,128,128,128] --strategy pipeline --micro-batches 8"
        assert plan.main([*line.split(), "--order", order, "--table", str(table)]) == 0
        with table.open() as file:
            results[order] = units.num_bytes(next(csv.DictReader(file))["activations"])
    assert results["1f1b"] < results["interleaved"] < results["gpipe"]
    # All forward passes of a stage with two layers: their inputs and outputs of 8000 rows.
    assert results["gpipe"] > 4 * 8000 * 2 * 128


_FILE = """
import keras

def build_model():
    layers = [keras.Input((None, 8)), keras.layers.Dense(16), keras.layers.LSTM(4)]
    model = keras.Sequential([*layers, keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    return model
"""


def test_own_models_are_planned_as_shapes(tmp_path: Path) -> None:
    """A Python file, its saved model, a recipe, and a model larger than any host."""
    file = tmp_path / "planned_model.py"
    file.write_text(_FILE)
    of_file = Program(str(file), sizes=(50,))
    of_file.build().save(tmp_path / "model.keras")
    weights = 4 * (8 * 16 + 16 + 4 * 4 * (16 + 4 + 1) + 5 * 3)
    for program in (of_file, Program(str(tmp_path / "model.keras"), sizes=(50,))):
        x, y = program.batch(2)
        assert (x.shape, y.shape, y.dtype) == ((2, 50, 8), (2,), "int64")
        step = ReplicatedStep(program)
        assert 0 <= step.weights - weights <= 64  # and a seed
        # Each iteration of the loop keeps tensors for the backward pass.
        assert step.peak(1000) > 1000 * 50 * (8 + 16 + 5 * 4) * 4
    assert ReplicatedStep(Program("digits")).optimizer > 0
    layout = auto.Layout("mirrored", 2, 1, remat="offload")
    train = auto.command(Program("digits"), layout, 64, {})
    assert train.endswith("digits --batch-size 64 --strategy mirrored --devices 2 "
                          "--offload-activations")  # fmt: skip
    assert auto.command(of_file, layout, 64, {}) == (
        "tfdist.Trainer(build_model, tfdist.strategies.create('mirrored', 2), "
        "offload_activations=True).fit(x, y, batch_size=64)"
    )
    large = Network("mlp", (100_000,), settings={"units": (400_000, 400_000)})
    assert ReplicatedStep(large).peak(8) > 3e12


@pytest.mark.parametrize(
    "strategy",
    ["mirrored", *(pytest.param(one, marks=pytest.mark.long)
                   for one in ("sharded", "pipeline", "tensor_parallel"))],
)  # fmt: skip
def test_trainer_plans_the_variables_that_each_device_gets(strategy: str) -> None:
    trainer = Trainer(build, strategy, ["CPU:1", "CPU:2"])
    planned = trainer.plan(FIT["x"], FIT["y"], batch_size=8)
    trainer.fit(**FIT)
    held = bytes_by_device([*trainer.model.variables, *optimizer_state(trainer.model)])
    expected = [held.get(name, 0) for name in ("CPU:1", "CPU:2")]
    assert [one.weights + one.optimizer for one in planned] == expected


_SUBCLASSED = """
import keras

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return self.dense(x)

def build_model({}):
    model = Net()
    model.compile("adam", "mse")
    return model
"""


def test_subclassed_models_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the shape of an example. Refused are files without a function that makes the model."""
    file = tmp_path / "subclassed_model.py"
    file.write_text(_SUBCLASSED.format(""))
    assert ReplicatedStep(Program(str(file), sizes=(8,))).weights == 4 * (8 * 4 + 4)
    assert plan.main(["memory", str(file)]) == 1
    assert "Name the shape of an example with --input" in capsys.readouterr().err
    for name, text in (("a.py", _SUBCLASSED.format("width")), ("b.py", "model = None")):
        (tmp_path / name).write_text(text)
        assert plan.main(["memory", str(tmp_path / name)]) == 1
        assert "a function build_model() without arguments" in capsys.readouterr().err


def test_auto_prefers_the_fastest_layout_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    line = "auto --model mlp --input 1000 --batch 64 --set units=[4000,4000] --hosts 2"
    assert plan.main([*line.split(), "--cards", "2xA10G"]) == 0
    roomy = capsys.readouterr().out
    assert "one_device" in roomy.splitlines()[4]
    assert plan.main([*line.split(), "--cards", "2x2110MB", "--example-ms", "1"]) == 0
    tight = capsys.readouterr().out
    assert "tfdist.strategies.create('sharded'" in tight
    assert "of a card at least" in tight
    assert plan.main([*line.split(), "--cards", "2x1900MB", "--example-ms", "1"]) == 1
    assert "Nothing fits 4 cards of 1.9 GB" in capsys.readouterr().err


def test_auto_does_not_try_what_saves_nothing() -> None:
    """Nothing of a ReLU is recomputed."""
    cluster = auto.Cluster(Card(4e9), 1, 1, Link(1e9, 0.0), example_seconds=1e-3)
    fitting, _ = auto.search(Network("mlp", (64,), 10), cluster, 16384)
    assert "all" not in {one.layout.remat for one in fitting}
    assert fitting[0].seconds == pytest.approx(16.384)


@pytest.mark.long
def test_a_run_takes_the_layout_that_fits() -> None:
    """On a host without GPUs, one device; whoever chooses a layout cannot have it chosen."""
    config, planned = auto.applied(TrainConfig(auto=True, verbose=0))
    assert planned.endswith("B")  # the speed of a CPU is unknown
    assert (config.strategy, config.accumulate, config.auto) == ("one_device", 1, False)
    for flag, given in (("strategy", {"strategy": "mirrored"}),
                        ("offload-activations", {"offload_activations": True})):  # fmt: skip
        with pytest.raises(ConfigurationError, match=f"--auto chooses --{flag} itself"):
            auto.applied(TrainConfig(auto=True, **given))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memory --strategy pipeline", "--strategy pipeline splits a model over several devices"),
        ("memory --model resnet05", "got 'resnet05'. Did you mean resnet50?"),
        ("memory --card many", "--card 'many': expected a size like 24GB"),
        ("memory --card 24", "--card 24: not more than --reserve 1800MiB, so nothing is left"),
        ("memory --table a.txt", "a.txt: expected a name that ends with .md or .csv"),
        ("memory nowhere.keras", "nowhere.keras: expected a .keras file"),
        ("auto --cards 8xH10", "Did you mean H100?"),
        ("memory --input a,b", "--input a,b: expected numbers like 224,224,3"),
        ("memory --model cnn --input 8", "--model cnn cannot be built with --input 8"),
        ("memory --model mlp --set dept=3", "got an unexpected keyword argument 'dept'"),
    ],
)
def test_invalid_flags_raise(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(line.split()) == 1
    assert message in capsys.readouterr().err
