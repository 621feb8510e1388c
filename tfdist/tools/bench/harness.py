"""Code that all benchmarks share: flags, tables, files, and information about the machine.

Importing it imports no TensorFlow.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import command, files, table_files, tables
from tfdist.tools.bench import machine


def add_arguments(
    parser: ArgumentParser,
    *,
    steps: int | None = None,
    rounds: int | None = None,
    table: bool = False,
    chart: bool = False,
) -> None:
    """Adds the flags of a benchmark's files, `--smoke`, `--steps` and `--rounds`.

    Args:
        parser: The parser to add the flags to.
        steps: Default of `--steps`; None: the flag is not added.
        rounds: Default of `--rounds`; None: the flag is not added.
        table: Whether to add `--table`.
        chart: Whether to add `--chart`.
    """
    if steps is not None:
        parser.add_argument(
            "--steps", type=PositiveInt, default=steps, metavar="N", help="steps of a measurement"
        )
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=PositiveInt, default=rounds, metavar="N",
            help="measurements per variant; the variants run in turns",
        )  # fmt: skip
    parser.add_argument("--json", metavar="FILE.json", help="write all results to this file")
    if table:
        parser.add_argument(
            "--table", metavar="FILE", help="write the table to this .md or .csv file"
        )
    if chart:
        parser.add_argument("--chart", metavar="FILE.png", help="plot the results to this file")
    parser.add_argument(
        "--smoke", action="store_true", help="use tiny sizes, to check that the benchmark runs"
    )


def run_one_of(
    commands: Mapping[str, str], program: str, description: str, arguments: Sequence[str] | None
) -> int:
    """Runs the benchmark that a command line names, as `command.run_one_of` does.

    The function `run` of its module takes `output`, an `Output`, instead of the names of files.

    Returns:
        The exit code: 0, 1 after an error, 130 after an interrupt.
    """
    return command.run(
        lambda: command.run_one_of(commands, program, description, arguments, _make_output)
    )


def _make_output(benchmark: str, values: dict[str, Any]) -> None:
    """Replaces the values of `--json`, `--table` and `--chart`, if it has them, by an `Output`."""
    if "json" in values:
        paths = {flag: values.pop(flag, None) for flag in ("json", "table", "chart")}
        values["output"] = Output(benchmark, **paths)


class Output:
    """Prints the results of a benchmark and writes its files.

    It also measures the processor time of other processes from its creation until `conclude`.

    Args:
        benchmark: Name of the benchmark.
        json: File for all results, or None.
        table: File for the table, or None.
        chart: File for the chart, or None.

    Raises:
        ConfigurationError: A file cannot be written. This is checked before any measurement.
    """

    def __init__(
        self,
        benchmark: str,
        json: str | None,
        table: str | None,
        chart: str | None,
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
        """Prints a table, and writes it to the table file, if any.

        Args:
            header: Headings of the columns.
            rows: Cells of each row.
            title: Title of the table.
            num_names: Number of left-aligned text columns.
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
        """Prints information about the machine, and writes the results and the chart to files.

        Args:
            results: Numbers, strings, lists and dicts.
            note: Explanation of the table.
            paint: Plots the results (second argument) to a matplotlib figure (first argument).
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
