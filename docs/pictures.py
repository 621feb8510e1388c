"""Draws the pictures of the performance pages from their own tables: `python docs/pictures.py`.

So every value is written once. Pictures that a benchmark draws itself (`--chart`) are not redrawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "performance"
OVERVIEW = HERE / "performance.md"


class Picture(NamedTuple):
    """What is drawn of a table.

    Attributes:
        page: Name of the page in `performance/`.
        section: Heading above the table; its first table is drawn.
        labels: Columns that name a row.
        values: Columns with the values; those in brackets are left out.
        unit: Unit of the values.
    """

    page: str
    section: str
    labels: Sequence[int]
    values: Sequence[int]
    unit: str


PICTURES: Mapping[str, Picture] = {
    "step": Picture(
        "training", "The step", [0, 1, 2], [8], "time of a step, relative to Keras in graph"
    ),
    "input": Picture("data", "Large photographs", [0], [1], "images per second"),
    "checkpoint": Picture("data", "Checkpoints", [0], [1, 3], "milliseconds blocked per save"),
    "allreduce": Picture("communication", "All-reduce", [0], [1], "GB/s"),
    "scaling": Picture("communication", "Scaling over processes", [0], [1, 2], "images per second"),
    "memory": Picture("memory", "Memory", [0], [1, 3], "bytes per weight, all devices"),
    "pipeline": Picture(
        "memory", "Stages of a pipeline", [0, 1], [2, 3, 4], "speed-up over one device"
    ),
}


def first_tables(text: str) -> dict[str, list[list[str]]]:
    """Returns the first table under each heading, as cells of text, header first."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^##* ", text, flags=re.M)[1:]:
        heading, _, body = section.partition("\n")
        rows = re.search(r"(?:^\|.*\n)+", body, flags=re.M)
        if rows:
            lines = [line.strip("|").split("|") for line in rows[0].splitlines()]
            found[heading] = [[cell.strip(" `") for cell in line] for line in lines]
            del found[heading][1]  # the line below the header
    return found


def number(cell: str) -> float:
    """Returns the first number of a cell, without quartiles and ratios in brackets."""
    match = re.match(r"[\d.]+", cell)
    return float(match[0]) if match else float("nan")


def draw(picture: Picture, rows: Sequence[Sequence[str]]) -> Figure:
    """Returns bars: a group for each row of the table, and a color for each column."""
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


def draw_overview(rows: Sequence[Sequence[str]]) -> Figure:
    """Returns bars with the advantages of the first table, on a logarithmic axis."""
    rows = rows[1:]
    figure = Figure(figsize=(9, 0.6 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    advantages = [number(row[4]) for row in rows]
    colors = ["#2a7f62" if value >= 1 else "#c0603a" for value in advantages]
    # Bars start at 1, so that those to the left are disadvantages.
    lengths = [value - 1 for value in advantages]
    bars = axes.barh(range(len(rows)), lengths, left=1, color=colors)
    labels = [f"{value:.2f}" for value in advantages]
    axes.bar_label(bars, labels, padding=2, fontsize="small")
    names = [f"{row[0]}: {row[1]}; {row[3].partition(':')[0]}".replace("`", "") for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    axes.invert_yaxis()
    axes.axvline(1.0, color="gray")
    axes.set(xscale="log", xlim=(0.3, 20), xlabel="advantage over the baseline")
    axes.set_xticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes.minorticks_off()
    return figure


def main() -> None:
    """Draws all pictures."""
    pages = {path.stem: first_tables(path.read_text()) for path in FOLDER.glob("*.md")}
    for name, picture in PICTURES.items():
        table = pages[picture.page][picture.section]
        draw(picture, table).savefig(FOLDER / f"{name}.png", dpi=90)
    table = first_tables(OVERVIEW.read_text())["Performance"]
    draw_overview(table).savefig(FOLDER / "overview.png", dpi=90)


if __name__ == "__main__":
    main()
