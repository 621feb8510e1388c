"""The checks themselves on GPUs (`pytest -m gpu`), and their runner anywhere."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.studies.gpu import __main__ as command
from tests.studies.gpu import runner
from tests.studies.gpu.checks import CHECKS, Check, Host
from tfdist.cluster import gpus


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check_passes_on_gpus(check: Check, tmp_path: Path) -> None:
    host = Host.here()
    if not host.num_devices:
        pytest.skip("no GPU here; python -m tests.studies.gpu --rehearse runs this on CPU devices")
    if reason := check.reason_to_skip(host, check.needs_horovod and command.has_horovod(host)):
        pytest.skip(reason)
    result = runner.run(check, host, tmp_path, has_horovod=True)
    assert result.status == "passed", result.detail


@pytest.mark.long
@pytest.mark.parametrize("name", ["precision", "determinism", "prefetch", "speed-keras-float32"])
def test_check_can_be_rehearsed_on_cpus(name: str, tmp_path: Path) -> None:
    assert command.main(["--rehearse", "--only", name, "--out", str(tmp_path)]) == 0


def printing(code: str, **options: Any) -> Check:
    return Check(
        "speed-tfdist-float32", "title", lambda host: [sys.executable, "-c", code], **options
    )


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("print('noise\\n{\"detail\": \"10 images/s\", \"images_per_second\": 10}')",
         "passed", "10 images/s"),
        ("print('{\"detail\": \"differs\"}'); raise SystemExit(1)", "failed", "differs see "),
        ("print('[1]'); import os; os.abort()", "failed", "see "),
        ("import time; time.sleep(60)", "timed out", "see "),
    ],
)  # fmt: skip
def test_status_of_a_check_follows_its_exit(
    code: str, status: str, detail: str, tmp_path: Path
) -> None:
    limit = 1.0 if status == "timed out" else 60.0
    check = dataclasses.replace(printing(code), seconds=limit)
    result = runner.run(check, Host.rehearsing(), tmp_path, has_horovod=False)
    assert result.status == status
    assert result.detail.startswith(detail)
    assert result.figures == ({"images_per_second": 10} if status == "passed" else {})


def test_table_compares_speeds() -> None:
    results = [
        runner.Result(name, name, "passed", f"{speed} images/s", 1.0, {"images_per_second": speed})
        for name, speed in [
            ("speed-keras-mixed_float16", 100),
            ("speed-tfdist-mixed_float16", 120),
            ("scaling-2", 210),
        ]
    ]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(runner.table(results, Host.rehearsing()))
    rows = capture.get().splitlines()
    assert any("120 images/s, 1.20x plain Keras" in row for row in rows)
    assert any("210 images/s, 1.75x one GPU" in row for row in rows)
    assert not any("100 images/s," in row for row in rows)


@pytest.mark.parametrize(
    ("number", "skipped"),
    [
        (1, ["mirrored", "multi-worker", "horovod", "prefetch", *["scaling-2", "scaling-4"],
             "scaling-8"]),
        (2, ["horovod", "scaling-4", "scaling-8"]),
        (4, ["horovod", "scaling-8"]),
        (8, ["horovod"]),
    ],
)  # fmt: skip
def test_checks_that_need_more_gpus_are_skipped(number: int, skipped: list[str]) -> None:
    host = Host(number, rehearsal=False, visible="0")
    reasons = {check.name: check.reason_to_skip(host, has_horovod=False) for check in CHECKS}
    assert [name for name, reason in reasons.items() if reason] == skipped
    for check in CHECKS:
        assert check.command(host)[0] == sys.executable


@pytest.mark.parametrize(
    ("installed", "visible", "number", "children_see"),
    [(0, None, 0, "-1"), (4, None, 4, "0,1,2,3"), (4, "", 4, "0,1,2,3"), (8, "6,7", 2, "6,7"),
     (4, "-1", 0, "-1")],
)  # fmt: skip
def test_gpus_of_the_host(
    installed: int,
    visible: str | None,
    number: int,
    children_see: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "installed", lambda: [f"GPU-{i}" for i in range(installed)])
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(gpus.VISIBLE, visible)
    host = Host.here()
    assert (host.num_devices, host.visible) == (number, children_see)
    assert host.environ(full_float32=True)["CUDA_VISIBLE_DEVICES"] == children_see


def test_command_without_a_gpu_suggests_a_rehearsal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "installed", list)
    assert command.main([]) == 2
    assert "--rehearse" in capsys.readouterr().out
