"""Measures all contenders on one case, in turns, and says what came out as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.bench.interleave import ratio, spread, take_turns
from tfdist.bench.step import inference
from tfdist.bench.step.contenders import CONTENDERS, Case, Measure, Sample

#: What a step of tfdist may take at most, as a ratio to a step of each other contender.
_GOALS = {"by hand": 1.05, "Keras": 1.0, "Keras, in graph": 1.0}
#: On the smallest model, where Keras's Python is most of the time.
_MLP_GOALS = {"by hand": 1.05, "Keras": 1 / 3}
#: In a call of `evaluate` or `predict`, which makes its iterator and ends with its result.
_CALL_GOALS = {"by hand": 1.1, "Keras": 1.0, "Keras, in graph": 1.0}


def case(case: Case, num_rounds: int, what: str = "fit") -> dict[str, Any]:
    """Returns model, replicas and, for each contender, its times and tfdist's ratios to them.

    Args:
        case: What is trained.
        num_rounds: Measurements of each contender.
        what: Which of the trainer's methods is measured: "fit", "evaluate" or "predict".

    Returns:
        Numbers, strings, lists and dicts, as they go into JSON. A contender that fails has nothing
        but an `error`.
    """
    ready: dict[str, Measure] = {}
    results: dict[str, dict[str, Any]] = {}
    ways = CONTENDERS if what == "fit" else inference.contenders(case, what == "evaluate")
    for name, prepare in ways.items():
        try:
            measure = prepare(case)
            # Compiles; all start from the same weights, so that the losses have to agree.
            results[name] = {"first_loss": measure().loss}
            ready[name] = measure
        except Exception as error:  # whatever a contender dies of, the others are measured
            results[name] = {"error": _in_short(error)}
    samples = take_turns(ready, num_rounds)
    goals = _CALL_GOALS if what != "fit" else _MLP_GOALS if case.model == "mlp" else _GOALS
    for name, own in samples.items():
        results[name] |= _times(own)
        if name != "tfdist" and "tfdist" in samples:
            results[name]["tfdist_ratio"] = _ratios(samples["tfdist"], own, goals.get(name))
    return {
        "what": what,
        "model": case.model,
        "replicas": case.strategy.num_replicas,
        "batch_size": case.workload.batch_size,
        "steps": case.num_steps,
        "steps_per_execution": case.steps_per_execution,
        "rounds": num_rounds,
        "contenders": results,
    }


def _times(samples: Sequence[Sample]) -> dict[str, Any]:
    """Milliseconds per step: by the clock, and of all the process's threads."""
    ms, cpu_ms = [s.ms for s in samples], [s.cpu_ms for s in samples]
    return {
        "ms": spread(ms)._asdict(),
        "cpu_ms": spread(cpu_ms)._asdict(),
        "samples_ms": ms,
        "samples_cpu_ms": cpu_ms,
    }


def _ratios(ours: Sequence[Sample], theirs: Sequence[Sample], goal: float | None) -> dict[str, Any]:
    """The ratio of our times to another contender's, within each round."""
    by_clock = ratio([s.ms for s in ours], [s.ms for s in theirs])
    return {
        "ms": by_clock._asdict(),
        "cpu_ms": ratio([s.cpu_ms for s in ours], [s.cpu_ms for s in theirs])._asdict(),
        "goal": goal,
        "met": None if goal is None else by_clock.median <= goal,
    }


def _in_short(error: Exception) -> str:
    """An error on one line; TensorFlow's go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"
