"""The scaling plan: formulas computed by hand, and the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.tools.plan import published
from tfdist.console import units
from tfdist.tools.plan import __main__ as plan
from tfdist.tools.plan.exchange import EXCHANGES, PAYLOAD, Link, Profile, Wires, step

OUTER, INNER = Link(1e9, 1e-4), Link(1e10, 1e-5)
PROFILE = Profile(seconds=0.1, gradient_bytes=1e8)


@pytest.mark.parametrize(
    ("name", "num_workers", "per_host", "num_servers", "seconds"),
    [
        ("ring", 2, 1, 1, 0.1 + 2e-4),
        ("ring", 4, 1, 1, 0.15 + 6e-4),
        ("ring", 4, 4, 1, 0.015 + 6e-5),  # all on one host
        ("ring", 4, 2, 1, 0.15 + 2e-4 + 4e-5),  # two of six messages between the hosts
        ("parameter_server", 4, 1, 1, 2 * (0.4 + 1e-4)),
        ("parameter_server", 4, 1, 2, 2 * (0.2 + 1e-4)),
        ("parameter_server", 2, 1, 8, 2 * (0.1 + 1e-4)),  # limited by the worker's link
        ("hierarchical", 8, 4, 1, 2 * (0.03 + 1e-5) + 0.1 + 2e-4),
        ("hierarchical", 4, 4, 1, 2 * (0.03 + 1e-5)),
        ("central_storage", 4, 4, 1, 2 * (0.04 + 1e-5)),
        ("central_storage", 8, 4, 1, None),
        ("sharded", 4, 1, 1, 0.15 + 6e-4),
        ("sharded_optimizer", 4, 1, 1, 0.225 + 9e-4),
        ("sharded_parameters", 4, 1, 1, 0.225 + 9e-4),
    ],
)
def test_exchange_times_match_the_formulas(
    name: str, num_workers: int, per_host: int, num_servers: int, seconds: float | None
) -> None:
    wires = Wires(OUTER, INNER, per_host, num_servers)
    found = EXCHANGES[name](1e8, num_workers, wires)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_step_overlaps_and_compresses() -> None:
    wires = Wires(OUTER._replace(latency=0.0), INNER)
    after = step("ring", PROFILE, 2, wires)
    assert after == pytest.approx((0.2, 0.5, 0.1))
    # Two buckets of 50 ms, ready after 2/3 and all of the 100 ms.
    hidden = step("ring", PROFILE, 2, wires, bucket_bytes=5e7)
    assert hidden == pytest.approx((0.15 + 0.1 / 6, 6 / 10, 0.1))
    # The buckets of a slow link wait for each other.
    slow_link = Wires(Link(2.5e8, 0.0), INNER)
    waiting = step("ring", PROFILE, 2, slow_link, bucket_bytes=5e7)
    assert waiting == pytest.approx((0.1 * 2 / 3 + 0.4, 0.1 / (0.1 * 2 / 3 + 0.4), 0.4))
    # Weights come back from servers after the backward pass.
    served = step("parameter_server", PROFILE, 2, wires, bucket_bytes=5e7)
    assert served is not None
    assert served.seconds == pytest.approx(0.1 * 2 / 3 + 0.2 + 0.2)
    small = step("ring", PROFILE, 2, wires, compression=2)
    assert small == pytest.approx((0.15, 2 / 3, 0.05))
    whole = step("sharded", PROFILE, 2, wires, compression=2)  # sends float32
    assert whole == after
    slow = step("ring", PROFILE._replace(exchange_seconds=0.02, exchange_rate=5e8), 2, wires)
    assert slow == pytest.approx((0.32, 0.3125, 0.22))
    assert step("ring", PROFILE, 1, wires) == (0.1, 1.0, 0.0)


def test_command_writes_table_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, table = tmp_path / "a.json", tmp_path / "a.csv"
    profile.write_text(json.dumps(PROFILE._asdict()))
    line = "scaling --workers 1..256 --bandwidth 25Gb --latency 20us --strategy all"
    files = ["--profile", str(profile), "--table", str(table), "--chart", str(tmp_path / "a.png")]
    assert plan.main([*line.split(), *files]) == 0, capsys.readouterr().err
    assert "Every worker has a batch of 32" in " ".join(capsys.readouterr().out.split())
    header, first, *_, last = csv.reader(table.read_text().splitlines())
    assert [first[0], last[0]] == ["1", "256"]
    ring = 1e3 * (0.1 + 2 * 255 / 256 * 1e8 / (PAYLOAD * 25e9 / 8) + 2 * 255 * 20e-6)
    assert float(last[header.index("ring, ms")]) == pytest.approx(ring, abs=0.1)
    assert (tmp_path / "a.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "0..4"], "--workers 0..4: expected 1..256"),
        (["--workers", "8..1"], "--workers 8..1: expected 1..256"),
        (["--latency", "20"], "--latency '20': expected a time like 20us"),
        (["--bandwidth", "25"], "--bandwidth '25': expected a bandwidth"),
        (
            ["--strategy", "pipeline"],
            "--strategy pipeline: its scaling cannot be predicted, because its stages",
        ),
        (["--strategy", "rign"], "Did you mean ring?"),
        (["--profile", "none.json"], "--profile none.json: there is no such file"),
    ],
)
def test_invalid_flags_raise(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(["scaling", *flags]) == 1
    assert message in capsys.readouterr().err


def test_latencies_are_parsed() -> None:
    assert units.short_seconds("20us") == pytest.approx(20e-6)
    assert units.short_seconds("1.5 ms") == pytest.approx(1.5e-3)


@pytest.mark.parametrize(
    "row", published.ROWS, ids=lambda row: f"{row.network}-{row.workers * row.devices}"
)
def test_published_efficiencies_are_reproduced(row: published.Row) -> None:
    """Within 15 %, from the hardware's data alone."""
    assert row.planned() == pytest.approx(row.efficiency, rel=0.15)
