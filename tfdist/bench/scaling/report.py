"""Table and chart of the scaling benchmark."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.bench.scaling.link_ratios import GOAL
from tfdist.console import files, sizes, tables

NOTE = (
    "Medians, quartiles in brackets. Each process has one core and its own share of the batch. "
    "'efficiency': images a second of a process, to those of one process alone. 'exchange': the "
    "fraction of a step beyond that of two processes which exchange nothing. 'by hand': tfdist's "
    "time to that of a loop by hand over the same engine."
)

#: Ratios of a step over a link, by their names in the results.
_RATIOS = {"to_longer": "to longer", "to_core": "to core", "to_at_once": "to at once"}
LINK_NOTE = (
    "Medians, quartiles in brackets, of the slower of two processes of one core each; 'of the "
    "processor': what all threads of the process computed meanwhile. Ratios of a step: 'to "
    "longer', to the longer of computing and sending, and sending the last bucket (goal of the "
    f"step in buckets: {GOAL}); 'to core', to the same, where what sending takes of the processor "
    "adds to computing, which it shares the core with; 'to at once', to the engine's step that "
    "sends all at once."
)


def show(result: dict[str, Any]) -> None:
    """Prints the table of one model."""
    tables.numbers(
        ("engine", "way", "images/s", "efficiency", "exchange", "by hand"),
        [(row["engine"], row["way"], *_cells(row)) for row in result["rows"]],
        title=f"{result['model']}, batch {result['batch_per_worker']} a process, "
        f"{result['steps']} steps, {result['rounds']} rounds",
        num_names=2,
    )
    for row in result["rows"]:
        if "error" in row:
            tables.text(f"{row['engine']}, {row['way']} fails: {row['error']}")


def show_link(results: Sequence[dict[str, Any]]) -> None:
    """Prints a table for each link."""
    for link, same in itertools.groupby(results, lambda result: result["link"]):
        rows = list(same)
        tables.numbers(
            ("engine", "", "ms", "of the processor", *_RATIOS.values()),
            [cells for row in rows for cells in _link_cells(row)],
            title=f"over {link}, {sizes.in_words(rows[0]['bytes'])} of gradients in "
            f"{rows[0]['buckets']} buckets",
            num_names=2,
        )
    tables.text(LINK_NOTE)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the efficiencies, with the quartiles as error bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(results), 4.5), layout="constrained")
    for axes, result in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results, strict=True
    ):
        rows = [row for row in result["rows"] if "efficiency" in row]
        found = [row["efficiency"] for row in rows]
        medians = [own["median"] for own in found]
        low = [own["median"] - own["low"] for own in found]
        high = [own["high"] - own["median"] for own in found]
        places = range(len(rows))
        axes.barh(places, medians, xerr=[low, high], capsize=3)
        axes.set_yticks(places, [f"{row['engine']}, {row['way']}" for row in rows])
        axes.invert_yaxis()
        axes.axvline(1.0, color="gray", linestyle="--")
        axes.set(title=result["model"], xlabel="efficiency of two processes")
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return ["fails", "", "", ""]
    rates = "{median:.0f} ({low:.0f}-{high:.0f})".format(**row["images_per_s"])
    fractions = [_fraction(row[name]) if name in row else "" for name in ("efficiency", "exchange")]
    if "to_by_hand" not in row:
        return [rates, *fractions, ""]
    return [rates, *fractions, "{median:.2f} ({low:.2f}-{high:.2f})".format(**row["to_by_hand"])]


def _link_cells(row: dict[str, Any]) -> Iterator[list[str]]:
    """Yields a line for each thing that was measured of an engine."""
    for name, own in row["ms"].items():
        spent = f"{row['cpu_ms'][name]['median']:.0f}"
        ratios = row["steps"].get(name)
        cells = [_ratio(ratios[to]) for to in _RATIOS] if ratios else [""] * len(_RATIOS)
        yield [
            row["engine"],
            name,
            "{median:.0f} ({low:.0f}-{high:.0f})".format(**own),
            spent,
            *cells,
        ]


def _ratio(own: Mapping[str, Any]) -> str:
    cell = "{median:.2f} ({low:.2f}-{high:.2f})".format(**own)
    return f"{cell}, goal {'met' if own['met'] else 'missed'}" if "goal" in own else cell


def _fraction(own: Mapping[str, Any]) -> str:
    cell = "{median:.0%} ({low:.0%}-{high:.0%})".format(**own)
    return f"{cell}, goal {own['goal']:.0%}" if "goal" in own else cell
