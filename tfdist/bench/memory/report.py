"""The table of the memory benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.console import sizes, tables


def show(results: Sequence[dict[str, Any]]) -> None:
    """Prints what each contender holds at rest and in a step, beside what is expected."""
    tables.numbers(
        ("strategy", "replicas", "at rest", "of", "in a step", "of", "sent", "of", "each device"),
        [_row(result) for result in results],
        title=(
            f"{results[0]['parameters']:,} weights under Adam in float32: bytes a weight, of all "
            "replicas together, of so many expected; bytes a weight that each process sends in a "
            "step, of so many expected; variables that the largest device has"
        ),
    )


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    parameters = result["parameters"]
    per_weight = ("rest", "expected_rest", "step", "expected_step", "sent", "expected_sent")
    return (
        result["contender"],
        str(result["devices"]),
        *(f"{result[name] / parameters:.1f}" for name in per_weight),
        sizes.in_words(result["largest"]),
    )
