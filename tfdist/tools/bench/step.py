"""`tfdist bench step`: time and examples per second of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import tables
from tfdist.tools.bench import harness
from tfdist.tools.bench.workloads import DEFAULT, WORKLOADS

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy
    from tfdist.tools.bench.contenders import Case, Measure, Sample

DESCRIPTION = "measures the time of a step, compared with plain Keras and a hand-written loop"

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
#: Goals: tfdist's time relative to another variant's.
_GOALS = {"by hand": 1.05, "Keras": 1.0, "Keras, every batch": 1.0, "Keras, in graph": 1.0}
#: For the smallest model, where plain Keras mostly runs Python.
_MLP_GOALS = {"by hand": 1.05, "Keras": 1 / 3, "Keras, every batch": 1.0}
#: For whole calls of `evaluate` and `predict`.
_CALL_GOALS = {"by hand": 1.1, "Keras": 1.0, "Keras, in graph": 1.0}
#: For the checks between workers: of the smallest model, and of all others.
_CHECKS_GOALS = {"checks off": 1.05}, {"checks off": 1.02}
_GOALS_BY_METHOD = {"fit": (_MLP_GOALS, _GOALS), "checks": _CHECKS_GOALS}
#: Relative difference of losses that is too large for rounding in float32.
_SAME_LOSS = 1e-3
_SMOKE_ROUNDS = 2
_XLA = {"false": False, "true": True, "auto": "auto"}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--models", nargs="+", choices=list(WORKLOADS), default=list(DEFAULT),
        help="networks to train; resnet50 is for GPUs",
    )  # fmt: skip
    parser.add_argument(
        "--what", nargs="+", choices=["fit", "evaluate", "predict", "checks"], default=["fit"],
        help="methods of the trainer, or the cost of the checks between two workers",
    )  # fmt: skip
    parser.add_argument(
        "--replicas", nargs="+", type=PositiveInt, default=[1, 2], metavar="N",
        help="numbers of replicas: 1 for one device, 2 or more for mirrored",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=list(PRECISIONS), default="float32", help="number format"
    )
    parser.add_argument(
        "--jit-compile", choices=list(_XLA), default="false",
        help="XLA in tfdist and plain Keras; auto: the default of both",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size",
        "--batch",
        type=PositiveInt,
        metavar="N",
        help="global batch size (default: the network's)",
    )
    parser.add_argument(
        "--steps", type=PositiveInt, metavar="N",
        help="steps per measurement (default: a few tenths of a second on two CPU cores)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", action="store_true",
        help="instead, profile a step of tfdist and of a hand-written loop",
    )  # fmt: skip
    harness.add_arguments(parser, rounds=7)


def run(
    models: Sequence[str],
    what: Sequence[str],
    replicas: Sequence[int],
    precision: str,
    jit_compile: str,
    batch_size: int | None,
    steps: int | None,
    profile: bool,
    rounds: int,
    output: harness.Output,
    smoke: bool,
) -> None:
    """Measures and prints tables; the arguments are the values of the flags.

    Raises:
        DeviceError: There are fewer devices than replicas.
    """
    import tfdist
    from tfdist import devices, strategies

    devices.configure(max(replicas))  # before the first strategy initializes TensorFlow
    results = []
    num_rounds = _SMOKE_ROUNDS if smoke else rounds
    changes: dict[str, Any] = {"precision": precision, "jit_compile": _XLA[jit_compile]}
    changes |= {"batch_size": batch_size} if batch_size else {}
    options = (changes, steps, smoke)
    if "checks" in what:
        what = [method for method in what if method != "checks"]
        for model in models:  # in new processes, as `checks` needs two workers
            results.append(
                tfdist.notebook_launch(_compare_checks, args=(model, num_rounds, *options))
            )
            _show(results[-1], output)
    cases = [
        _case(model, strategies.create("one_device" if n == 1 else "mirrored", n), *options)
        for model in models
        for n in replicas
    ]
    if profile:
        from tfdist.tools.bench import contenders

        for case in cases:
            contenders.show_profile(case)
        return
    for case in cases:
        for method in what:
            results.append(compare(case, num_rounds, method))
            _show(results[-1], output)
    from tfdist.tools.bench.contenders import STEPS_PER_EXECUTION

    output.conclude(
        results,
        f"{harness.NOTE} 'ratio': tfdist's time relative to this row, with the same callback. "
        f"'Keras, in graph': Keras with steps_per_execution={STEPS_PER_EXECUTION} at most.",
    )


def compare(case: Case, num_rounds: int, what: str = "fit") -> dict[str, Any]:
    """Measures all variants on one case, in turns.

    Returns:
        Results for JSON: model, replicas and, for each variant, its times and tfdist's times
        relative to them. A variant that fails has only an `error`.
    """
    from tfdist.tools.bench import contenders

    ready: dict[str, Measure] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, prepare in contenders.available(case, what).items():
        try:
            measure = prepare(case)
            # The first call compiles. All variants start with the same weights, so their losses
            # must agree.
            results[name] = {"first_loss": measure().loss}
            ready[name] = measure
        except Exception as error:  # measure the other variants anyway
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            results[name] = {"error": f"{type(error).__name__}: {' '.join(lines)[:300]}"}
    samples = harness.run_in_turns(ready, num_rounds)
    mlp_goals, other_goals = _GOALS_BY_METHOD.get(what, (_CALL_GOALS, _CALL_GOALS))
    goals = mlp_goals if case.model == "mlp" else other_goals
    for name, measured in samples.items():
        ms, cpu_ms = [s.ms for s in measured], [s.cpu_ms for s in measured]
        results[name] |= {
            "ms": harness.spread(ms),
            "cpu_ms": harness.spread(cpu_ms),
            "examples_per_s": harness.spread([1e3 * case.workload.batch_size / one for one in ms]),
            "samples_ms": ms,
            "samples_cpu_ms": cpu_ms,
        }
        ours = contenders.COUNTERPARTS.get(name, "tfdist")
        if name != ours and ours in samples:
            results[name]["tfdist_ratio"] = _ratios(samples[ours], measured, goals.get(name))
    return {
        "what": what,
        "model": case.model,
        "precision": case.workload.precision,
        "jit_compile": case.workload.jit_compile,
        "replicas": case.strategy.num_replicas,
        "batch_size": case.workload.batch_size,
        "steps": case.num_steps,
        "steps_per_execution": case.steps_per_execution,
        "rounds": num_rounds,
        "contenders": results,
    }


def _case(
    model: str, strategy: Strategy, changes: dict[str, Any], steps: int | None, smoke: bool
) -> Case:
    from tfdist.tools.bench.contenders import Case

    workload = WORKLOADS[model].tiny() if smoke else WORKLOADS[model]
    workload = dataclasses.replace(workload, **changes)
    return Case(model, workload, strategy, steps or workload.num_steps)


def _compare_checks(model: str, num_rounds: int, *options: Any) -> dict[str, Any]:
    """Compares training with and without checks. Called on each of two workers."""
    from tfdist import strategies

    strategy = strategies.create("multi_worker")
    return compare(_case(model, strategy, *options), num_rounds, "checks")


def _ratios(ours: Sequence[Sample], theirs: Sequence[Sample], goal: float | None) -> dict[str, Any]:
    """Returns the ratios of tfdist's time to another variant's, within each round."""
    wall = harness.ratio([s.ms for s in ours], [s.ms for s in theirs])
    return {
        "ms": wall,
        "cpu_ms": harness.ratio([s.cpu_ms for s in ours], [s.cpu_ms for s in theirs]),
        "goal": goal,
        "met": None if goal is None else wall["median"] <= goal,
    }


def _show(result: dict[str, Any], output: harness.Output) -> None:
    number = result["replicas"]
    output.show(
        ("", "ms/step", "CPU ms/step", "examples/s", "ratio", "goal"),
        [(name, *_cells(contender)) for name, contender in result["contenders"].items()],
        f"{result['what']} of {result['model']} in {result['precision']}, "
        f"jit_compile={result['jit_compile']}, "
        + _replicas(result["what"], number)
        + f", batch {result['batch_size']}, {result['steps']} steps, {result['rounds']} rounds",
    )
    for name, contender in result["contenders"].items():
        if "error" in contender:
            tables.text(f"{name} failed: {contender['error']}")
    losses = [
        contender["first_loss"]
        for contender in result["contenders"].values()
        if "error" not in contender
    ]
    if (
        result["precision"] == "float32"
        and losses
        and max(losses) - min(losses) > _SAME_LOSS * max(map(abs, losses))
    ):
        tables.text(f"Warning: the losses of the variants differ: {losses}.")


def _replicas(what: str, number: int) -> str:
    if what == "checks":
        return f"{number} workers"
    return "one device" if number == 1 else f"{number} mirrored replicas"


def _cells(contender: dict[str, Any]) -> list[str]:
    if "error" in contender:
        return ["failed", "", "", "", ""]
    times = [f"{contender['ms']['median']:.3f}", f"{contender['cpu_ms']['median']:.3f}"]
    times.append(f"{contender['examples_per_s']['median']:.0f}")
    if "tfdist_ratio" not in contender:
        return [*times, "", ""]
    ratio = contender["tfdist_ratio"]
    relative = harness.as_text(ratio["ms"])
    if ratio["goal"] is None:
        return [*times, relative, ""]
    return [*times, relative, f"{ratio['goal']:.2f} {'met' if ratio['met'] else 'missed'}"]
