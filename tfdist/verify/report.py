"""Verdicts, in words for people or as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from tfdist.errors import MissingError, TfdistError
from tfdist.verify.results import BOUND
from tfdist.verify.verdict import Verdict

#: By strategy; an error where the trial could not be made.
Outcomes = Mapping[str, Verdict | TfdistError]

_MOST_LINES = 5


def healthy(outcome: Verdict | TfdistError) -> bool:
    """Tells whether nothing is wrong: what is not installed has not failed."""
    return outcome.passed if isinstance(outcome, Verdict) else isinstance(outcome, MissingError)


def as_text(name: str, outcome: Verdict | TfdistError) -> str:
    """Returns `PASS`, `FAIL` or `NONE`, and what was found."""
    if isinstance(outcome, TfdistError):
        return f"{'NONE' if healthy(outcome) else 'FAIL'} {name}: {outcome}"
    worst = outcome.differences[0]
    head = f"{name}, {_count(outcome.num_replicas, 'replica')}"
    if outcome.num_workers > 1:
        head += f" in {outcome.num_workers} processes"
    if outcome.passed:
        return (
            f"PASS {head}: plain Keras's numbers on one device, to {worst.size:.1e} "
            f"({worst.what}; {BOUND:.0e} is tolerated)"
        )
    lines = [f"FAIL {head}"]
    if outcome.off:
        lines.append(f"not plain Keras's numbers on one device, on {_ranks(outcome.off)}:")
        lines += [str(d) for d in outcome.differences[:_MOST_LINES] if d.times > 1.0]
    if outcome.apart:
        lines.append(f"weights are not rank 0's to the bit on {_ranks(outcome.apart)}")
    return "\n     ".join(lines)


def as_json(outcomes: Outcomes) -> str:
    """Returns `{"passed": ..., "strategies": {name: ...}}`; a difference without end is null."""
    strategies = {name: _plain(outcome) for name, outcome in outcomes.items()}
    return json.dumps(
        {"passed": all(map(healthy, outcomes.values())), "strategies": strategies}, indent=2
    )


def _plain(outcome: Verdict | TfdistError) -> dict:
    if isinstance(outcome, TfdistError):
        return {"passed": None if healthy(outcome) else False, "error": str(outcome)}
    numbers = [
        {"what": d.what, "size": _finite(d.size), "times_tolerated": _finite(d.times)}
        for d in outcome.differences
    ]
    return {"passed": outcome.passed} | outcome._asdict() | {"differences": numbers}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'s' if number > 1 else ''}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
