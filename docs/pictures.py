"""Draws the pictures of performance.md from its own tables: `python docs/pictures.py`.

So a figure stands in one place. What a benchmark drew by itself (`--chart`) is not redrawn here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
PAGE = HERE / "performance.md"


class Picture(NamedTuple):
    """What is drawn of a table.

    Attributes:
        section: The heading under which the table stands, the first one there.
        labels: Columns that name a row.
        values: Columns whose numbers are drawn; those in brackets are left out.
        unit: Of the numbers.
    """

    section: str
    labels: Sequence[int]
    values: Sequence[int]
    unit: str


PICTURES: Mapping[str, Picture] = {
    "step": Picture(
        "The step", [0, 1, 2], [8], "time of a step, to Keras's with steps_per_execution"
    ),
    "input": Picture("Input", [0], [1], "images a second"),
    "checkpoint": Picture("Checkpoints", [0], [1, 3], "milliseconds that a save takes"),
    "allreduce": Picture("All-reduce", [0], [1], "GB/s"),
    "scaling": Picture("Scaling over processes", [0], [1, 2], "images a second"),
    "memory": Picture("Memory", [0], [1, 3], "bytes a weight, all devices"),
    "pipeline": Picture("Stages of a pipeline", [0, 1], [2, 3, 4], "speed-up over one device"),
}


def tables(text: str) -> dict[str, list[list[str]]]:
    """Returns the first table under each heading, its header first, as cells of text."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        heading, _, body = section.partition("\n")
        rows = re.search(r"(?:^\|.*\n)+", body, flags=re.M)
        if rows:
            lines = [line.strip("|").split("|") for line in rows[0].splitlines()]
            found[heading] = [[cell.strip(" `") for cell in line] for line in lines]
            del found[heading][1]  # the rule below the header
    return found


def number(cell: str) -> float:
    """Returns the first number of a cell: what follows in brackets are quartiles and ratios."""
    match = re.match(r"[\d.]+", cell)
    return float(match[0]) if match else float("nan")


def draw(picture: Picture, rows: Sequence[Sequence[str]]) -> Figure:
    """Returns bars, a group for each row of the table and a colour for each column."""
    header, *rows = rows
    figure = Figure(
        figsize=(6.5, 1.2 + 0.22 * len(rows) * len(picture.values)), layout="constrained"
    )
    axes = figure.subplots()
    thick = 0.8 / len(picture.values)
    for place, column in enumerate(picture.values):
        heights = [number(row[column]) for row in rows]
        places = [row + place * thick for row in range(len(rows))]
        bars = axes.barh(places, heights, height=thick, label=header[column])
        axes.bar_label(bars, fmt="%g", padding=2, fontsize="small")
    middle = 0.4 - thick / 2
    names = [", ".join(row[column] for column in picture.labels).replace("`", "") for row in rows]
    axes.set_yticks([row + middle for row in range(len(rows))], names)
    axes.invert_yaxis()
    axes.set(xlabel=picture.unit)
    axes.margins(x=0.12)
    if len(picture.values) > 1:
        axes.legend(fontsize="small")
    return figure


def main() -> None:
    """Draws all of them into the folder beside the page."""
    found = tables(PAGE.read_text())
    for name, picture in PICTURES.items():
        draw(picture, found[picture.section]).savefig(HERE / "performance" / f"{name}.png", dpi=90)


if __name__ == "__main__":
    main()
