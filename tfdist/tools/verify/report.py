"""The verdict of a trial, as text and as JSON. Imports no TensorFlow."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.errors import MissingError, TfdistError, TooFewDevicesError
from tfdist.tools.verify.results import TOLERANCE, Difference


class Verdict(NamedTuple):
    """The result of a trial, which is the same on every worker.

    Attributes:
        strategy: Name of the strategy.
        num_workers: Number of processes.
        num_replicas: Number of replicas in all processes.
        differences: Differences from plain Keras on this worker, the largest first.
        differing: Ranks that differ from plain Keras by more than the tolerance.
        inconsistent: Ranks with weights that are not bitwise identical to those of rank 0.
    """

    strategy: str
    num_workers: int
    num_replicas: int
    differences: list[Difference]
    differing: list[int]
    inconsistent: list[int]

    @property
    def passed(self) -> bool:
        """Whether the strategy matches one device."""
        return not self.differing and not self.inconsistent


#: Verdicts by strategy, or the error that prevented the trial.
Outcomes = Mapping[str, Verdict | TfdistError]

_MAX_LINES = 5


def healthy(outcome: Verdict | TfdistError) -> bool:
    """Returns whether a strategy passed, or could not run for want of a package or of devices."""
    if isinstance(outcome, Verdict):
        return outcome.passed
    return isinstance(outcome, (MissingError, TooFewDevicesError))


def as_text(name: str, outcome: Verdict | TfdistError) -> str:
    """Returns `PASS`, `FAIL` or `NONE` with the reason."""
    if isinstance(outcome, TfdistError):
        return f"{'NONE' if healthy(outcome) else 'FAIL'} {name}: {outcome}"
    worst = outcome.differences[0]
    head = f"{name}, {_count(outcome.num_replicas, 'replica')}"
    if outcome.num_workers > 1:
        head += f" in {outcome.num_workers} processes"
    if outcome.passed:
        return (
            f"PASS {head}: matches plain Keras on one device; largest difference {worst.size:.1e} "
            f"({worst.what}; tolerance {TOLERANCE:.0e})"
        )
    lines = [f"FAIL {head}"]
    if outcome.differing:
        lines.append(f"differs from plain Keras on one device, on {_ranks(outcome.differing)}:")
        lines += [str(d) for d in outcome.differences[:_MAX_LINES] if d.times > 1.0]
    if outcome.inconsistent:
        lines.append(
            f"weights are not bitwise identical to those of rank 0, on "
            f"{_ranks(outcome.inconsistent)}"
        )
    return "\n     ".join(lines)


def as_json(outcomes: Outcomes) -> str:
    """Returns `{"passed": ..., "strategies": {name: ...}}`; an infinite difference is null."""
    strategies = {name: _as_dict(outcome) for name, outcome in outcomes.items()}
    return json.dumps(
        {"passed": all(map(healthy, outcomes.values())), "strategies": strategies}, indent=2
    )


def _as_dict(outcome: Verdict | TfdistError) -> dict:
    if isinstance(outcome, TfdistError):
        return {"passed": None if healthy(outcome) else False, "error": str(outcome)}
    numbers = [
        {"what": d.what, "size": _finite(d.size), "times_tolerated": _finite(d.times)}
        for d in outcome.differences
    ]
    return {"passed": outcome.passed} | outcome._asdict() | {"differences": numbers}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
