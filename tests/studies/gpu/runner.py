"""Runs checks one after the other, each in its own process group, and shows the results.

A check that hangs, as NCCL does where ranks disagree, or that crashes TensorFlow ends alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.studies.gpu.checks import Check, Host
from tests.support import ROOT

_COLORS = {"passed": "green", "failed": "red", "timed out": "magenta", "skipped": "yellow"}


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        check: Its name.
        title: What it checks.
        status: "passed", "failed", "timed out" or "skipped".
        detail: The figure, the reason, or the last line of a failure.
        seconds: Duration.
        figures: Numbers that it reported.
    """

    check: str
    title: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)


def run(check: Check, host: Host, logs: Path, has_horovod: bool) -> Result:
    """Runs a check."""
    if reason := check.reason_to_skip(host, has_horovod):
        return Result(check.name, check.title, "skipped", reason)
    logs.mkdir(parents=True, exist_ok=True)
    log, began = logs / f"{check.name}.log", time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            check.command(host),
            cwd=ROOT,
            env=host.environ(check.full_float32) | {"PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(check.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    took = time.monotonic() - began
    reported = _reported(log.read_text(errors="replace"))
    detail = str(reported.pop("detail", ""))
    if code == 0:
        return Result(check.name, check.title, "passed", detail, took, reported)
    status = "failed" if code is not None else "timed out"
    return Result(check.name, check.title, status, f"{detail} see {log}".strip(), took, reported)


def end_group(process: subprocess.Popen) -> None:
    """Kills the remaining processes of a check, such as workers that hung."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reported(output: str) -> dict[str, Any]:
    """Returns the JSON object in the last line of an output, if it is one."""
    last = output.strip().rpartition("\n")[2]
    try:
        result = json.loads(last)
    except json.JSONDecodeError:
        return {}
    return result if isinstance(result, dict) else {}


def table(results: list[Result], host: Host) -> Table:
    """Returns the table of all results, with speed-ups beside images per second."""
    devices = "logical CPU devices, a rehearsal" if host.rehearsal else "GPUs"
    shown = Table("check", "result", "detail", "seconds", title=f"{host.num_devices} {devices}")
    for result in results:
        color = _COLORS[result.status]
        shown.add_row(
            result.title,
            f"[{color}]{result.status}[/]",
            (result.detail + _compared(result, results)).replace("[", r"\["),
            f"{result.seconds:.0f}" if result.seconds else "",
        )
    return shown


def _compared(result: Result, results: list[Result]) -> str:
    """Returns a speed over that of plain Keras, or over one GPU, as a text."""
    speeds = {one.check: one.figures.get("images_per_second") for one in results}
    speed = speeds[result.check]
    kind, _, rest = result.check.partition("-")
    beside = {"speed": rest.replace("tfdist", "keras", 1), "scaling": "tfdist-mixed_float16"}
    base = speeds.get(f"speed-{beside.get(kind)}")
    if not speed or not base or beside[kind] == rest:
        return ""
    return f", {speed / base:.2f}x {'plain Keras' if kind == 'speed' else 'one GPU'}"


def write(results: list[Result], host: Host, file: Path) -> None:
    """Writes the results to a JSON file."""
    record = {"host": dataclasses.asdict(host), "checks": [dataclasses.asdict(r) for r in results]}
    file.write_text(json.dumps(record, indent=1) + "\n")
