"""Formats verdicts as a terminal table, as Markdown or as JSON."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Any

from rich.table import Table

from tests.conformance.all_cases import ALL_CASES
from tests.conformance.verdicts import KERAS, KERAS_EVEN, Question, Verdict

Verdicts = dict[Question, Verdict]
#: Names of tables. Markers with the name enclose each table in the README.
CASES_TABLE, PROGRAMS_TABLE = "compatibility", "programs"
_SEVERITY = ("absent", "exact", "refused", "wrong", "hang", "crash")


def _columns(verdicts: Verdicts) -> list[str]:
    return list(dict.fromkeys(question.engine for question in verdicts))


def title(engine: str) -> str:
    """Returns the column title of an engine."""
    titles = {
        KERAS: "plain Keras",
        KERAS_EVEN: "plain Keras, even batches",
        "parameter_server": "tfdist parameter_server, 1 worker",
        "mirrored hierarchical_copy": "tfdist mirrored, hierarchical_copy",
        "mirrored NCCL stand-in": "tfdist mirrored, NCCL stand-in",
    }
    return titles.get(engine, f"tfdist {engine}")


def _cells(verdicts: Verdicts) -> dict[str, dict[str, Verdict]]:
    """Groups verdicts by case and engine, with the worst over the numbers of replicas."""
    cells: dict[str, dict[str, Verdict]] = collections.defaultdict(dict)
    for question, verdict in verdicts.items():
        known = cells[question.case].get(question.engine, verdict)
        worse = max(known, verdict, key=lambda v: (_SEVERITY.index(v.status), v.largest))
        cells[question.case][question.engine] = worse
    return cells


def _text(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.status == "absent":
        return "no such option"
    if verdict.status != "wrong":
        return verdict.status
    return f"wrong ({verdict.largest:.1g})" if math.isfinite(verdict.largest) else "wrong (inf)"


def counts(verdicts: Verdicts) -> str:
    """Returns how many cases are exact, as in `plain Keras: 3 of 5, tfdist towers: 5 of 5`."""
    parts = []
    for engine in _columns(verdicts):
        tried = [row[engine].status for row in _cells(verdicts).values() if engine in row]
        count = f"{title(engine)}: {tried.count('exact')} of {len(tried) - tried.count('absent')}"
        refused = tried.count("refused")
        parts.append(f"{count} and {refused} refused" if refused else count)
    return ", ".join(parts)


def num_replicas(verdicts: Verdicts) -> str:
    """Returns the numbers of replicas greater than one, as in `2 and 3`, or `1`."""
    numbers = sorted({q.num_replicas for q in verdicts if q.num_replicas > 1})
    return " and ".join(map(str, numbers)) or "1"


def terminal(verdicts: Verdicts) -> Table:
    """Returns the table for a terminal."""
    engines = _columns(verdicts)
    table = Table("case", "feature", *map(title, engines), caption=counts(verdicts))
    colours = {"exact": "green", "refused": "yellow", "wrong": "red", "hang": "magenta"}
    colours["crash"] = "magenta"
    for name, row in _cells(verdicts).items():
        texts = [
            f"[{colours.get(row[e].status, 'dim')}]{_text(row[e])}[/]" if e in row else ""
            for e in engines
        ]
        table.add_row(name, ALL_CASES[name].feature.replace("[", r"\["), *texts)
    return table


def markdown(verdicts: Verdicts) -> str:
    """Returns the table as Markdown."""
    engines = _columns(verdicts)
    lines = [
        f"{counts(verdicts)}; against plain Keras on one device, over {num_replicas(verdicts)} "
        "replicas. "
        "In brackets the largest difference in a weight, loss, metric or count of steps.",
        "",
        "| | " + " | ".join(map(title, engines)) + " |",
        "|---" * (len(engines) + 1) + "|",
    ]
    for name, row in _cells(verdicts).items():
        cells = [_text(row.get(engine)) for engine in engines]
        lines.append(f"| {ALL_CASES[name].feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replaced(text: str, name: str, table: str) -> str:
    """Returns the text with the table between the markers of that name replaced.

    Raises:
        ValueError: If the text has no such markers.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"The file has no markers for the table. Add {begin} and {end} to it.")
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text, count=1)


def records(verdicts: Verdicts) -> list[dict[str, Any]]:
    """Returns the verdicts as JSON values; infinity becomes None."""
    return [
        {
            **dataclasses.asdict(question),
            "feature": ALL_CASES[question.case].feature,
            **dataclasses.asdict(verdict),
            "largest": verdict.largest if math.isfinite(verdict.largest) else None,
        }
        for question, verdict in verdicts.items()
    ]
