"""Tables and JSON of the input benchmark."""

from __future__ import annotations

from typing import Any

from tfdist.bench import document
from tfdist.console import tables


def show(results: dict[str, dict[str, Any]], images: str, num_rounds: int) -> None:
    """Prints the table of the contenders."""
    tables.numbers(
        ("", "images/s", "pipelines is faster by", "packed at size", "goal"),
        [(name, *_cells(own)) for name, own in results.items()],
        title=f"{images}, cut to 224x224, batch 64, {num_rounds} rounds",
    )


def show_waiting(result: dict[str, float]) -> None:
    """Prints how long a model waited for its data."""
    tables.text(
        f"Model on one core, input on another: {result['steps']:.0f} steps of "
        f"{result['step_ms']:.0f} ms; waited for data {result['data_wait']:.2%} of the time "
        f"(goal: under {result['goal']:.0%}); the input alone makes a batch in "
        f"{result['batch_ms']:.0f} ms."
    )


def conclude(results: dict[str, Any], others: float, path: str | None) -> None:
    """Prints the machine's facts, and writes everything as JSON.

    Args:
        results: What was measured.
        others: Fraction of the processor that other processes took meanwhile.
        path: Where to write; None: nowhere.
    """
    tables.text(
        f"{document.conclude('input', results, others, path)}\n"
        "The contenders' own workers are among the others. Medians, and quartiles in brackets."
    )


def _cells(own: dict[str, Any]) -> list[str]:
    """Speed of one contender, and by what each of our two ways is faster."""
    ratios = [own.get("ratio"), own.get("packed_ratio")]
    cells = ["{median:.2f} ({low:.2f}-{high:.2f})".format(**r) if r else "" for r in ratios]
    goals = [
        f"{r['goal']:.2f} {'met' if r['met'] else 'missed'}" for r in ratios if r and "goal" in r
    ]
    return ["{median:.0f} ({low:.0f}-{high:.0f})".format(**own["images_per_s"]), *cells, *goals]
