"""Tables and JSON of the step benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.bench import document
from tfdist.bench.step.contenders import STEPS_PER_EXECUTION
from tfdist.console import tables

if TYPE_CHECKING:
    from tfdist.bench.step.contenders import Case
    from tfdist.bench.step.trace import Trace

#: Relative difference of the losses from which contenders cannot have computed the same.
_SAME_LOSS = 1e-3
_MOST_ROWS = 16


def show(result: dict[str, Any]) -> None:
    """Prints the table of one case."""
    one = result["replicas"] == 1
    tables.numbers(
        ("", "ms/step", "CPU ms/step", "tfdist takes", "goal"),
        [(name, *_cells(own)) for name, own in result["contenders"].items()],
        title=f"{result['what']} of {result['model']}, "
        + ("one device" if one else f"{result['replicas']} mirrored replicas")
        + f", batch {result['batch_size']}, {result['steps']} steps, {result['rounds']} rounds",
    )
    for name, own in result["contenders"].items():
        if "error" in own:
            tables.text(f"{name} fails: {own['error']}")
    losses = [own["first_loss"] for own in result["contenders"].values() if "error" not in own]
    if losses and max(losses) - min(losses) > _SAME_LOSS * max(map(abs, losses)):
        tables.text(f"The contenders do not compute the same: losses {losses}.")


def conclude(results: Sequence[dict[str, Any]], others: float, path: str | None) -> None:
    """Prints the machine's facts, and writes everything as JSON.

    Args:
        results: Of all cases, as `measure.case` returns them.
        others: Fraction of the processor that other processes took meanwhile.
        path: Where to write; None: nowhere.
    """
    tables.text(
        f"{document.conclude('step', results, others, path)}\n"
        "Medians, and quartiles in brackets. 'tfdist takes': its time as a ratio to that row's. "
        f"'Keras, in graph': with steps_per_execution={STEPS_PER_EXECUTION} at most."
    )


def show_trace(case: Case, traces: dict[str, Trace]) -> None:
    """Prints by how much tfdist's step and that by hand differ, the largest differences first."""
    ours, theirs = traces.values()
    tables.text(
        f"{case.model}, {case.strategy.num_replicas} replicas: the loop's graph has "
        f"{ours.operations.total()} operations, by hand {theirs.operations.total()}"
    )
    _show_differences("operations in the graph", ours.operations, theirs.operations, 0)
    _show_differences("microseconds per step", ours.microseconds, theirs.microseconds, 1)


def _show_differences(
    heading: str, ours: Mapping[str, float], theirs: Mapping[str, float], decimals: int
) -> None:
    """Prints the largest differences between two counts."""
    rows = [(name, ours.get(name, 0), theirs.get(name, 0)) for name in ours.keys() | theirs.keys()]
    largest = sorted(rows, key=lambda row: (-abs(row[1] - row[2]), row[0]))[:_MOST_ROWS]
    tables.numbers(
        (heading, "tfdist", "by hand", "difference"),
        [
            (name, f"{a:.{decimals}f}", f"{b:.{decimals}f}", f"{a - b:+.{decimals}f}")
            for name, a, b in largest
        ],
    )


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
