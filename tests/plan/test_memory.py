"""What a step is planned to hold: by hand where it can be counted, and as the command says it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tfdist.console import sizes
from tfdist.plan import __main__ as plan
from tfdist.plan.memory import liveness, schedule, transfers
from tfdist.plan.memory.allocator import Allocator
from tfdist.plan.memory.check import GOAL
from tfdist.plan.memory.devices import Planner
from tfdist.plan.memory.liveness import Kept
from tfdist.plan.memory.operations import Operation
from tfdist.plan.memory.trace import trace
from tfdist.plan.network import Network

KB = 1 << 10


def test_allocator_gives_away_what_is_not_worth_splitting() -> None:
    allocator = Allocator()
    first = allocator.allocate(1000 * KB)
    allocator.allocate(1)
    assert allocator.in_use == 1000 * KB + 256
    allocator.free(first)
    again = allocator.allocate(600 * KB)
    assert again == first  # less than twice as large: whole
    allocator.free(again)
    assert allocator.allocate(400 * KB).size == 400 * KB
    assert allocator.peak == 1000 * KB + 256


def test_allocator_joins_what_is_free() -> None:
    allocator = Allocator()
    pieces = [allocator.allocate(512 * KB) for _ in range(3)]
    for piece in (pieces[0], pieces[2], pieces[1]):
        allocator.free(piece)
    assert allocator.in_use == 0
    assert allocator.allocate(2048 * KB).start == pieces[0].start


def test_tensors_live_until_they_are_read_for_the_last_time() -> None:
    size = 256 * KB
    operations = {
        "x": Operation("Conv2D", [], [], [size]),
        "seen": Operation("Reshape", [("x", 0)], [], [size], shares=True),
        "over": Operation("Relu", [("seen", 0)], [], [size], overwrites=True),
        "kept": Operation("Conv2D", [("over", 0)], [], [size]),
        "last": Operation("Relu", [("kept", 0)], [], [size], overwrites=True),
        "both": Operation("MatMul", [("over", 0), ("last", 0)], ["last"], [4]),
    }
    moments = list(schedule.one_by_one(schedule.order(operations)))
    found = liveness.peak(operations, moments)
    assert found == (2 * size + 256, "both")  # over and last, and the result
    held = liveness.peak(operations, moments, [Kept(size), Kept(size)])
    assert held.num_bytes == 4 * size + 256


def test_devices_hold_copies_of_what_they_read_of_others() -> None:
    size = 256 * KB
    operations = {
        "weight": Operation("ReadVariableOp", [], [], [size], elsewhere=True, device="a"),
        "x": Operation("Conv2D", [("weight", 0)], [], [size], device="a"),
        "y": Operation("MatMul", [("x", 0), ("weight", 0)], [], [4], device="b"),
        "z": Operation("MatMul", [("x", 0), ("y", 0)], [], [4], device="b"),
    }
    moved = transfers.with_transfers(operations)
    moments = schedule.one_by_one(schedule.order(moved))
    found = liveness.peaks(moved, moments, {"a": [Kept(size)], "b": []})
    assert found["a"].num_bytes == 2 * size
    assert found["b"].num_bytes == 2 * size + 256  # copies of x and weight, and y
    one = transfers.on_one(operations)
    moments = schedule.one_by_one(schedule.order(one))
    assert liveness.peak(one, moments, [Kept(size)]).num_bytes == 2 * size + 2 * 256


def test_threads_hold_what_they_compute_at_a_time() -> None:
    size = 256 * KB
    operations = {
        "x": Operation("Conv2D", [], [], [size]),
        "input": Operation("Conv2DBackpropInput", [("x", 0)], [], [size], work=2.0),
        "filter": Operation(
            "Conv2DBackpropFilter", [("x", 0)], [], [4], workspaces=[size], work=2.0
        ),
        "next": Operation("MaxPoolGrad", [("input", 0)], [], [size], workspaces=[size, size]),
    }
    in_order = schedule.order(operations)
    alone = liveness.peak(operations, schedule.moments(operations, in_order, 0))
    assert alone == (4 * size, "next")
    # The filter's gradient takes as long as the input's, for which what comes next has waited.
    both = liveness.peak(operations, schedule.moments(operations, in_order, 2))
    assert both == (6 * size + 256, "next")


def test_random_numbers_leave_room_behind() -> None:
    kept = liveness.peak({}, [], [Kept(256 * KB, drawn=True)])
    assert kept.num_bytes == 256 * KB


@pytest.fixture(scope="module")
def planner() -> Planner:
    traced = trace(Network("mlp", (512,), 8, settings={"units": (1024, 1024)}))
    return Planner(traced, num_devices=4)


def test_variables_are_counted(planner: Planner) -> None:
    weights = 4 * (512 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 8 + 8)
    (one,) = planner.on("one_device", 64)
    assert one.weights == one.gradients == weights
    assert 2 * weights <= one.optimizer <= 2 * weights + 64
    assert one.total >= 4 * weights
    replica, server = planner.on("parameter_server", 64)
    assert (replica.optimizer, server.activations) == (0, 0)
    assert server.weights == weights


def test_largest_batch_fits_and_the_next_does_not(planner: Planner) -> None:
    room = 64 << 20
    largest = planner.largest("mirrored", room)
    assert largest % 4 == 0
    assert planner.on("mirrored", largest)[0].total <= room
    assert planner.on("mirrored", largest + 4)[0].total > room
    assert planner.largest("one_device", 1 << 20) == 0


def test_command_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "memory.csv"
    line = "memory --model cnn --input 16,16,3 --batch 64 --devices 2 --precision mixed_float16"
    assert plan.main([*line.split(), "--card", "4GB", "--table", str(table)]) == 0
    assert "a global batch of 64" in capsys.readouterr().out
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["strategy"] for row in rows} >= {"one_device", "mirrored", "parameter_server"}
    assert int(rows[0]["largest batch"]) > 64


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("pipeline", ["stage 1", "stage 2"]),
        pytest.param("channel_split", ["device 1", "device 2"], marks=pytest.mark.long),
        pytest.param("sharded", ["device 1", "device 2"], marks=pytest.mark.long),
    ],
)
def test_command_lays_a_model_over_devices(
    strategy: str, devices: list[str], tmp_path: Path
) -> None:
    table = tmp_path / "memory.csv"
    line = "memory --model mlp --input 64 --classes 10 --batch 30 --devices 2 --set units=[512]"
    line += f" --strategy {strategy} --shard parameters --micro-batches 2 --card 2GB"
    assert plan.main([*line.split(), "--table", str(table)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["device"] for row in rows] == devices
    alone = 4 * (64 * 512 + 512 + 512 * 10 + 10)
    assert sum(sizes.num_bytes(row["weights"]) for row in rows) == pytest.approx(alone, rel=0.02)
    assert int(rows[0]["largest batch"]) > 30


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("memory --strategy pipeline", "--strategy pipeline: lays a model over several devices"),
        ("memory --model lstm", "lstm"),
        ("memory --card many", "'many': expected a size like 24GB"),
        ("memory --table a.txt", "a.txt: expected a name that ends with .md or .csv"),
        ("memory --input a,b", "--input a,b: expected numbers like 224,224,3"),
    ],
)
def test_what_cannot_be_planned(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(line.split()) == 1
    assert says in capsys.readouterr().err


@pytest.mark.long
def test_plan_beside_a_real_step(tmp_path: Path) -> None:
    results = tmp_path / "all.csv"
    assert plan.main(["memory-check", "--smoke", "--results", str(results)]) == 0
    _, row = csv.reader(results.read_text().splitlines())
    assert 0.5 < float(row[-1]) < 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "model"), [("pipeline", "mlp"), ("channel_split", "mlp"), ("sharded", "vit")]
)
def test_plan_over_devices_beside_real_steps(strategy: str, model: str, tmp_path: Path) -> None:
    results = tmp_path / "all.csv"
    line = f"memory-check --models {model} --optimizers adam --precisions float32 --results"
    assert plan.main([*line.split(), str(results), "--strategies", strategy]) == 0
    _, *rows = csv.reader(results.read_text().splitlines())
    assert rows
    assert all(abs(float(row[-1]) - 1) <= GOAL for row in rows), rows
