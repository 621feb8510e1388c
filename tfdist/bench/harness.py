"""What all benchmarks share: their flags, tables, files, and the facts of the machine.

Importing it imports no TensorFlow.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.bench import machine
from tfdist.console import files, table_files, tables


def add_arguments(
    parser: ArgumentParser, *, rounds: int | None = None, table: bool = False, chart: bool = False
) -> None:
    """Adds the flags of a benchmark's files, `--smoke` and `--rounds`.

    Args:
        parser: Gets the flags.
        rounds: Default of `--rounds`; None leaves the flag out.
        table: Whether to add `--table`.
        chart: Whether to add `--chart`.
    """
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=PositiveInt, default=rounds, metavar="N",
            help="measurements of each variant; variants run in turns",
        )  # fmt: skip
    parser.add_argument("--json", metavar="FILE.json", help="write all results to this file")
    if table:
        parser.add_argument(
            "--table", metavar="FILE", help="write the table to this .md or .csv file"
        )
    if chart:
        parser.add_argument("--chart", metavar="FILE.png", help="draw a chart")
    parser.add_argument(
        "--smoke", action="store_true", help="use tiny sizes, to check that the benchmark runs"
    )


class Output:
    """Prints the results of a benchmark and writes its files.

    It also records how much of the processor other processes use from its creation to `conclude`.

    Args:
        benchmark: Name of the benchmark.
        json: File for all results, or None.
        table: File for the table, or None.
        chart: File for the chart, or None.

    Raises:
        ConfigurationError: A file cannot be written: found before anything is measured.
    """

    def __init__(
        self,
        benchmark: str,
        json: str | None,
        table: str | None = None,
        chart: str | None = None,
    ) -> None:
        table_files.check(json, ".json")
        table_files.check(table, ".md", ".csv")
        table_files.check(chart, ".png")
        self._benchmark, self._json, self._table, self._chart = benchmark, json, table, chart
        self._load = machine.OtherLoad()

    def show(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        title: str,
        num_names: int = 1,
    ) -> None:
        """Prints a table, and writes it if there is a file for it.

        Args:
            header: Headings of the columns.
            rows: Cells of each row.
            title: Line above the table.
            num_names: Number of columns with text, which are aligned left.
        """
        tables.numbers(header, rows, title=title, num_names=num_names)
        if self._table:
            table_files.write(Path(self._table), header, rows)

    def conclude(
        self,
        results: Any,
        note: str = "",
        paint: Callable[[Any, Any], None] | None = None,
        size: tuple[float, float] = (8, 4.5),
    ) -> None:
        """Prints the facts of the machine; writes results and chart if there are files for them.

        Args:
            results: Numbers, strings, lists and dicts.
            note: How to read the table.
            paint: Draws the results (second argument) into a matplotlib figure (first argument).
            size: Width and height of the figure in inches.
        """
        facts = machine.facts() | {"share_of_other_processes": self._load.fraction()}
        if self._json is not None:
            document = {"benchmark": self._benchmark, "machine": facts, "results": results}
            with files.replacing(Path(self._json)) as temporary:
                temporary.write_text(json_format.dumps(document, indent=1) + "\n")
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        line = (
            f"{facts['processor']}, {facts['cores']} cores, {len(facts['gpus'])} GPUs; {versions}; "
            f"other processes used {facts['share_of_other_processes']:.0%} of the processor."
        )
        tables.text(f"{line}\n{note}" if note else line)
        if self._chart is None or paint is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        paint(figure, results)
        with files.replacing(Path(self._chart)) as temporary:
            figure.savefig(temporary, dpi=100)
