"""The table of the pipeline benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.console import tables

#: Of the ideal that a pipeline should reach, where nothing else takes the processor.
GOAL = 0.9


def show(results: Sequence[dict[str, Any]], step_ms: int) -> None:
    """Prints the speed-up of each pipeline beside the ideal, m n / (m + n - 1)."""
    rows = []
    for result in results:
        found = result["speed_up"]
        rows.append(
            (
                str(result["stages"]),
                result["order"],
                str(result["micro_batches"]),
                f"{result['ideal']:.2f}",
                f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})",
                f"{result['of_ideal']:.2f}",
            )
        )
    tables.numbers(
        ("stages", "order", "micro-batches", "ideal", "speed-up", "of the ideal"),
        rows,
        title=f"layers that wait, {step_ms} ms a step on one device; goal {GOAL:.1f} of the ideal",
    )
