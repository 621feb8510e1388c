"""`python -m tests.conformance`: compares each strategy with plain Keras on one device.

Runs the cases of the contract and the programs, and prints one table for each of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path

from rich.console import Console

from tests.conformance import existing_table, table
from tests.conformance.all_cases import ALL_CASES
from tests.conformance.cases import CASES
from tests.conformance.engines import STRATEGIES
from tests.conformance.layouts import LAYOUTS
from tests.conformance.verdicts import KERAS, KERAS_EVEN, Question, Verdict, run_all
from tests.programs.programs import PROGRAMS

ENGINES = (KERAS, KERAS_EVEN, *STRATEGIES, *LAYOUTS)
TABLES = {table.CASES_TABLE: CASES, table.PROGRAMS_TABLE: PROGRAMS}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=ALL_CASES, metavar="NAME", help="run only this one"
    )
    parser.add_argument("--table", choices=TABLES, help="run only this table")
    parser.add_argument("--strategy", action="append", choices=ENGINES, help="run only this column")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 3], help="default: 2 and 3")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel processes")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", action="store_true", help="print JSON with every difference")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="update the table in this file after every result, and keep its other cells",
    )
    parser.add_argument(
        "--quick", action="store_true", help="of the programs, only those that `make check` runs"
    )
    parser.add_argument(
        "--missing", action="store_true", help="skip what already has a cell in the file of --write"
    )
    arguments = parser.parse_args()
    if arguments.missing and not arguments.write:
        parser.error("--missing needs --write, the file whose empty cells are to be filled.")
    return arguments


def _questions(arguments: argparse.Namespace) -> list[Question]:
    """Returns the cases to run, with their engines and numbers of replicas.

    Plain Keras runs with 2 replicas only, because a process can have only one `MirroredStrategy`.
    Parameter servers match one device only with one worker, and one process drives device servers,
    whatever the number of replicas. Programs run with 2 replicas or processes if those are
    selected, because more of them exercise no other code, and over several processes only under
    strategies that `--strategy` names.
    """
    selected = set(arguments.replicas)
    program_replicas = [2] if 2 in selected else arguments.replicas
    counts = {KERAS: [2], KERAS_EVEN: [2], "one_device": [1]}
    for engine, layouts in LAYOUTS.items():
        sizes = {layout.num_workers for layout in layouts}
        counts[engine] = [1] if sizes == {1} else sorted(selected & sizes)
    # Two devices only: more of them exercise no other code of the NCCL stand-in.
    counts |= {"mirrored hierarchical_copy": [2], "mirrored NCCL stand-in": [2]}
    program_counts = counts | {engine: counts[engine][:1] for engine in LAYOUTS}
    cases = TABLES[arguments.table] if arguments.table else ALL_CASES
    results = []
    for case in arguments.case or cases:
        if arguments.quick and case in PROGRAMS and not PROGRAMS[case].quick:
            continue
        engines = arguments.strategy or (ENGINES if case in CASES else STRATEGIES)
        for engine in engines:
            if case in CASES:
                numbers = counts.get(engine, arguments.replicas)
            else:
                numbers = program_counts.get(engine, program_replicas)
            results += [Question(case, engine, number) for number in numbers]
    return results


def _with_answers(text: str, answers: table.Verdicts) -> str:
    """Returns the text of a README with `answers` filled into its tables."""
    for name, asked in TABLES.items():
        if own := {question: v for question, v in answers.items() if question.case in asked}:
            own = existing_table.merge(text, name, ENGINES, own)
            text = table.replaced(text, name, table.markdown(own))
    return text


def main() -> int:
    """Prints the tables, and returns 1 if a result of tfdist is wrong."""
    arguments = _arguments()
    progress, write_lock = Console(stderr=True), threading.Lock()
    before = arguments.write.read_text("utf-8") if arguments.write else ""
    answers: dict[Question, Verdict] = {}

    def report(question: Question, verdict: Verdict) -> None:
        if arguments.write:  # immediately, so that an interrupted command keeps its results
            with write_lock:
                answers[question] = verdict
                arguments.write.write_text(_with_answers(before, answers), "utf-8")
        progress.print(
            f"{question.case} {question.engine} {question.num_replicas}: {verdict.status}",
            *verdict.details[:2],
            highlight=False,
            markup=False,
        )

    questions = _questions(arguments)
    if arguments.missing:
        done = {cell for name in TABLES for cell in existing_table.answered(before, name, ENGINES)}
        questions = [q for q in questions if (q.case, q.engine) not in done]
    verdicts = run_all(questions, arguments.jobs, report)
    if arguments.json:
        print(json.dumps(table.records(verdicts), indent=1))
    for asked in TABLES.values():
        own = {question: v for question, v in verdicts.items() if question.case in asked}
        if own and not arguments.json:
            Console().print(table.terminal(own)) if not arguments.markdown else print(
                table.markdown(own)
            )
    ours = [v for question, v in verdicts.items() if question.engine not in (KERAS, KERAS_EVEN)]
    return int(any(verdict.status not in ("exact", "refused", "absent") for verdict in ours))


if __name__ == "__main__":
    sys.exit(main())
