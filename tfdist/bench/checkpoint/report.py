"""The table of the checkpoint benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.bench.checkpoint.measure import NONE
from tfdist.console import tables


def show(results: Sequence[dict[str, Any]]) -> None:
    """Prints, by size and contender, the time of a training and by how much a save holds it up."""
    for result in results:
        tables.numbers(
            ("who saves", "training, s", "to none", "a save holds up, ms"),
            [_row(name, own) for name, own in result["contenders"].items()],
            title=(
                f"{result['weights']} weights, {result['bytes'] / 1e6:.0f} MB, "
                f"{result['saves']} checkpoints, one every {result['every']} steps: "
                "medians (quartiles)"
            ),
        )
    if not any("Orbax" in result["contenders"] for result in results):
        tables.text("Orbax is left out: orbax-checkpoint is not installed.")


def _row(name: str, own: dict[str, Any]) -> tuple[str, ...]:
    held_up = "" if name == NONE else _spread(own["held_up_ms"], ".0f")
    of_none = "" if name == NONE else _spread(own["of_none"], ".2f")
    return name, _spread(own["whole_s"], ".2f"), of_none, held_up


def _spread(of: dict[str, float], form: str) -> str:
    return f"{of['median']:{form}} ({of['low']:{form}} to {of['high']:{form}})"
