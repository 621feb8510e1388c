"""What benchmarks of a network share: the flags of their files, and what goes into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from tfdist.console import files, table_files, tables


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags, and the one for a run that is over in a moment."""
    parser.add_argument("--json", metavar="FILE.json", help="where to write the results")
    parser.add_argument("--table", metavar="FILE", help="where to write the table, .md or .csv")
    parser.add_argument("--chart", metavar="FILE.png", help="where to draw it")
    parser.add_argument("--smoke", action="store_true", help="a tiny network, to see that it works")


class Outputs:
    """The files of a benchmark, and what it leaves in them.

    Watches from the first how much of the processor other processes take meanwhile.

    Args:
        json: Where to write the results, as all of these None: nowhere.
        table: Where to write the table.
        chart: Where to draw it.

    Raises:
        ConfigurationError: A file that cannot be, found before anything is measured.
    """

    def __init__(self, json: str | None, table: str | None, chart: str | None) -> None:
        table_files.check(json, ".json")
        table_files.check(table, ".md", ".csv")
        table_files.check(chart, ".png")
        from tfdist.bench.machine import OthersLoad

        self._json, self._table, self._chart = json, table, chart
        self._load = OthersLoad()

    def show(self, header: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
        """Prints a table, and writes it where wanted."""
        tables.numbers(header, rows, title=title)
        if self._table:
            table_files.write(Path(self._table), header, rows)

    def conclude(
        self, benchmark: str, results: Any, paint: Callable[[Any, Any], None], width: float
    ) -> None:
        """Prints the facts of the machine; writes the results and draws them where wanted.

        Args:
            benchmark: Its name.
            results: Plain data.
            paint: Draws the results, its second argument, into a matplotlib figure.
            width: Of the figure, in inches.
        """
        from tfdist.bench import document

        tables.text(document.conclude(benchmark, results, self._load.fraction(), self._json))
        if self._chart is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, 4.5), layout="constrained")
        paint(figure, results)
        with files.replacing(Path(self._chart)) as temporary:
            figure.savefig(temporary, dpi=100)
