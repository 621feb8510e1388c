"""Tables and JSON of the input benchmark."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from tfdist.bench import document

_console = Console(highlight=False, markup=False)


def show(results: dict[str, dict[str, Any]], num_images: int, num_rounds: int) -> None:
    """Prints the table of the contenders."""
    table = Table(
        title=f"{num_images} JPEGs of 30 to 100 kB, 224x224, batch 64, {num_rounds} rounds",
        title_justify="left",
    )
    table.add_column("")
    for heading in ("images/s", "pipelines is faster by", "goal"):
        table.add_column(heading, justify="right")
    for name, own in results.items():
        cells = ["{median:.0f} ({low:.0f}-{high:.0f})".format(**own["images_per_s"])]
        if ours := own.get("ratio"):
            cells.append("{median:.2f} ({low:.2f}-{high:.2f})".format(**ours))
            cells.append(f"{ours['goal']:.2f} {'met' if ours['met'] else 'missed'}")
        table.add_row(name, *cells)
    _console.print(table)


def show_waiting(result: dict[str, float]) -> None:
    """Prints how long a model waited for its data."""
    _console.print(
        f"Model on one core, input on another: {result['steps']:.0f} steps of "
        f"{result['step_ms']:.0f} ms; waited for data {result['data_wait']:.2%} of the time "
        f"(goal: under {result['goal']:.0%}); the input alone makes a batch in "
        f"{result['batch_ms']:.0f} ms."
    )


def conclude(results: dict[str, Any], others: float, path: str | None) -> None:
    """Prints the machine's facts, and writes everything as JSON.

    Args:
        results: What was measured.
        others: Share of the processor that other processes took meanwhile.
        path: Where to write; None: nowhere.
    """
    _console.print(
        f"{document.conclude('input', results, others, path)}\n"
        "The contenders' own workers are among the others. Medians, and quartiles in brackets."
    )
