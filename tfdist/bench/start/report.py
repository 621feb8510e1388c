"""Tables of the benchmark of first steps."""

from __future__ import annotations

from typing import Any

from tfdist.bench.start.models import BATCH_SIZE
from tfdist.console import tables


def show(result: dict[str, Any]) -> None:
    """Prints the table of one model."""
    rows = []
    for case in result["cases"]:
        middle = {key: value["median"] for key, value in case.items() if isinstance(value, dict)}
        rows.append(
            (
                f"{case['contender']}, {case['replicas']}",
                f"{middle['cpu_s']:.1f}",
                f"{middle['trace_cpu_s']:.1f}",
                f"{middle['rest_cpu_s']:.1f}",
                f"{middle['peak_gb']:.2f}",
                f"{middle['one_ratio']:.2f}",
                f"{middle['tfdist_ratio']:.2f}",
            )
        )
    tables.numbers(
        (
            "replicas",
            "CPU s",
            "to trace",
            "to optimize and run",
            "peak GB",
            "of the first row's",
            "tfdist takes",
        ),
        rows,
        title=f"{result['model']}, first fit of one step of {BATCH_SIZE} rows, "
        f"{result['rounds']} rounds",
    )
