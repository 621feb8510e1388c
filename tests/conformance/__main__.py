"""`python -m tests.conformance`: who gets the numbers of one device, and who does not.

It asks the cases of the contract and the programs, each for a table of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path

from rich.console import Console

from tests.conformance import standing, table
from tests.conformance.asked import ASKED
from tests.conformance.cases import CASES
from tests.conformance.engines import STRATEGIES
from tests.conformance.layouts import LAYOUTS
from tests.conformance.verdicts import KERAS, KERAS_EVEN, Question, Verdict, ask_all
from tests.programs.programs import PROGRAMS

ENGINES = (KERAS, KERAS_EVEN, *STRATEGIES, *LAYOUTS)
TABLES = {table.CASES_TABLE: CASES, table.PROGRAMS_TABLE: PROGRAMS}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--case", action="append", choices=ASKED, metavar="NAME", help="only this")
    parser.add_argument("--table", choices=TABLES, help="only the cases or programs of this one")
    parser.add_argument("--strategy", action="append", choices=ENGINES, help="only this column")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 3], help="default: 2 and 3")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", action="store_true", help="print JSON, with every difference")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="put each answer, as it comes, into the table of this file, where the rest stays",
    )
    return parser.parse_args()


def _questions(arguments: argparse.Namespace) -> list[Question]:
    """Plain Keras is asked for 2 replicas: it can have but one strategy in a process.

    Parameter servers have the numbers of one device with one worker. Programs are asked of
    strategies of one process, for 2 replicas if those are asked for: what they show does not
    depend on more.
    """
    asked = set(arguments.replicas)
    of_programs = [2] if 2 in asked else arguments.replicas
    counts = {e: sorted(asked & {o.num_workers for o in own}) for e, own in LAYOUTS.items()}
    counts |= {KERAS: [2], KERAS_EVEN: [2], "one_device": [1], "parameter_server": [1]}
    # Pairs of devices; another number of them shows nothing more of NCCL's stand-in.
    counts |= {"mirrored hierarchical_copy": [2], "mirrored NCCL stand-in": [2]}
    cases = TABLES[arguments.table] if arguments.table else ASKED
    return [
        Question(case, engine, num_replicas)
        for case in arguments.case or cases
        for engine in arguments.strategy or ENGINES
        if case in CASES or engine in STRATEGIES
        for num_replicas in counts.get(engine, arguments.replicas if case in CASES else of_programs)
    ]


def _with_answers(text: str, answers: table.Verdicts) -> str:
    """Returns the text of a README with answers in its tables."""
    for name, asked in TABLES.items():
        if own := {question: v for question, v in answers.items() if question.case in asked}:
            own = standing.joined(text, name, ENGINES, own)
            text = table.replaced(text, name, table.markdown(own))
    return text


def main() -> int:
    """Prints the table; returns 1 where tfdist is wrong."""
    arguments = _arguments()
    progress, one_writes = Console(stderr=True), threading.Lock()
    before = arguments.write.read_text("utf-8") if arguments.write else ""
    answers: dict[Question, Verdict] = {}

    def report(question: Question, verdict: Verdict) -> None:
        if arguments.write:  # at once: who ends the command keeps what has been answered
            with one_writes:
                answers[question] = verdict
                arguments.write.write_text(_with_answers(before, answers), "utf-8")
        progress.print(
            f"{question.case} {question.engine} {question.num_replicas}: {verdict.status}",
            *verdict.details[:2],
            highlight=False,
            markup=False,
        )

    verdicts = ask_all(_questions(arguments), arguments.jobs, report)
    if arguments.json:
        print(json.dumps(table.records(verdicts), indent=1))
    for asked in TABLES.values():
        own = {question: v for question, v in verdicts.items() if question.case in asked}
        if own and not arguments.json:
            Console().print(table.terminal(own)) if not arguments.markdown else print(
                table.markdown(own)
            )
    ours = [v for question, v in verdicts.items() if question.engine not in (KERAS, KERAS_EVEN)]
    return int(any(verdict.status not in ("exact", "refused") for verdict in ours))


if __name__ == "__main__":
    sys.exit(main())
