"""Table and chart of the scaling benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.bench.scaling.over_link import GOAL
from tfdist.console import files, sizes, tables

NOTE = (
    "Medians, quartiles in brackets. Each process has one core and its own share of the batch. "
    "'efficiency': images a second of a process, to those of one process alone. 'exchange': the "
    "fraction of a step beyond that of two processes which exchange nothing. 'by hand': tfdist's "
    "time to that of a loop by hand over the same engine."
)

LINK_NOTE = (
    "Medians, quartiles in brackets, of the slower of two processes of one core each. 'at once to "
    "sum': the step that sends all at once, to computing and sending one after the other. 'in "
    "buckets to longer': the step in buckets, to the longer of the two and the last bucket (goal: "
    f"{GOAL})."
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


def show_link(link: str, results: Sequence[dict[str, Any]]) -> None:
    """Prints the table of steps over a link."""
    names = list(results[0]["ms"])
    ratios = ("at_once_to_sum", "in_buckets_to_longer", "in_buckets_to_at_once")
    tables.numbers(
        ("engine", *(f"{name}, ms" for name in names), *(r.replace("_", " ") for r in ratios)),
        [
            (
                row["engine"],
                *("{median:.0f} ({low:.0f}-{high:.0f})".format(**row["ms"][n]) for n in names),
                *("{median:.2f} ({low:.2f}-{high:.2f})".format(**row[ratio]) for ratio in ratios),
            )
            for row in results
        ],
        title=f"over {link}, {sizes.in_words(results[0]['bytes'])} of gradients in "
        f"{results[0]['buckets']} buckets",
        num_names=1,
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


def _fraction(own: Mapping[str, Any]) -> str:
    cell = "{median:.0%} ({low:.0%}-{high:.0%})".format(**own)
    return f"{cell}, goal {own['goal']:.0%}" if "goal" in own else cell
