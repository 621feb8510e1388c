"""Tables and JSON of the step benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tfdist.bench import document
from tfdist.bench.step.contenders import STEPS_PER_EXECUTION

if TYPE_CHECKING:
    from tfdist.bench.step.contenders import Case
    from tfdist.bench.step.trace import Trace

_console = Console(highlight=False, markup=False)
#: Relative difference of the losses from which contenders cannot have computed the same.
_SAME_LOSS = 1e-3
_MOST_ROWS = 16


def show(result: dict[str, Any]) -> None:
    """Prints the table of one case."""
    one = result["replicas"] == 1
    table = Table(
        title=f"{result['model']}, "
        + ("one device" if one else f"{result['replicas']} mirrored replicas")
        + f", batch {result['batch_size']}, {result['steps']} steps, {result['rounds']} rounds",
        title_justify="left",
    )
    table.add_column("")
    for heading in ("ms/step", "CPU ms/step", "tfdist takes", "goal"):
        table.add_column(heading, justify="right")
    for name, own in result["contenders"].items():
        table.add_row(name, *_cells(own))
    _console.print(table)
    for name, own in result["contenders"].items():
        if "error" in own:
            _console.print(f"{name} fails: {own['error']}")
    losses = [own["first_loss"] for own in result["contenders"].values() if "error" not in own]
    if losses and max(losses) - min(losses) > _SAME_LOSS * max(losses):
        _console.print(f"The contenders do not compute the same: losses {losses}.")


def conclude(results: Sequence[dict[str, Any]], others: float, path: str | None) -> None:
    """Prints the machine's facts, and writes everything as JSON.

    Args:
        results: Of all cases, as `measure.case` returns them.
        others: Share of the processor that other processes took meanwhile.
        path: Where to write; None: nowhere.
    """
    _console.print(
        f"{document.conclude('step', results, others, path)}\n"
        "Medians, and quartiles in brackets. 'tfdist takes': its time as a ratio to that row's. "
        f"'Keras, in graph': with steps_per_execution={STEPS_PER_EXECUTION} at most."
    )


def show_trace(case: Case, traces: dict[str, Trace]) -> None:
    """Prints by how much tfdist's step and that by hand differ, the largest differences first."""
    ours, theirs = traces.values()
    _console.print(
        f"{case.model}, {case.strategy.num_replicas} replicas: the loop's graph has "
        f"{ours.operations.total()} operations, by hand {theirs.operations.total()}"
    )
    _console.print(_differences("operations in the graph", ours.operations, theirs.operations, 0))
    _console.print(_differences("microseconds per step", ours.microseconds, theirs.microseconds, 1))


def _differences(
    heading: str, ours: Mapping[str, float], theirs: Mapping[str, float], decimals: int
) -> Table:
    """The largest differences between two counts, as a table."""
    table = Table(heading)
    for column in ("tfdist", "by hand", "difference"):
        table.add_column(column, justify="right")
    rows = [(name, ours.get(name, 0), theirs.get(name, 0)) for name in ours.keys() | theirs.keys()]
    for name, a, b in sorted(rows, key=lambda row: (-abs(row[1] - row[2]), row[0]))[:_MOST_ROWS]:
        table.add_row(name, f"{a:.{decimals}f}", f"{b:.{decimals}f}", f"{a - b:+.{decimals}f}")
    return table


def _cells(own: dict[str, Any]) -> list[str]:
    """Times of one contender, and tfdist's ratio to it."""
    if "error" in own:
        return ["fails", "", "", ""]
    times = [f"{own['ms']['median']:.3f}", f"{own['cpu_ms']['median']:.3f}"]
    if "tfdist_ratio" not in own:
        return [*times, "", ""]
    ratio = own["tfdist_ratio"]
    taken = "{median:.2f} ({low:.2f}-{high:.2f})".format(**ratio["ms"])
    if ratio["goal"] is None:
        return [*times, taken, ""]
    return [*times, taken, f"{ratio['goal']:.2f} {'met' if ratio['met'] else 'missed'}"]
