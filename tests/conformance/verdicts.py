"""Runs cases under engines in subprocesses, where plain Keras may crash or hang."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import multiprocessing
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from tests import start_tensorflow
from tests.conformance.layouts import LAYOUTS, SECONDS, Group, Layout
from tests.programs.programs import PROGRAMS

TIMEOUT_SECONDS = 120.0
PROGRAM_SECONDS = 1800.0  # tracing a network with hundreds of layers takes minutes
GROUP_SECONDS = 2 * SECONDS  # a group reports a time-out itself, with the output of its workers
# The fork server has imported TensorFlow, which takes seconds, but has not initialized it:
# TensorFlow cannot be forked once it is initialized.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.conformance.engines"])

KERAS, KERAS_EVEN = "keras", "keras-even"


@dataclasses.dataclass(frozen=True)
class Question:
    """A case to run with one engine.

    Attributes:
        case: Name of the case.
        engine: A strategy of tfdist; `KERAS` for plain Keras under MirroredStrategy; `KERAS_EVEN`
            for the same with batches cut to multiples of the number of replicas, which shows the
            remaining errors.
        num_replicas: Number of replicas.
    """

    case: str
    engine: str
    num_replicas: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of a run.

    Attributes:
        status: "exact", "wrong", "crash" or "hang"; "refused" if tfdist raises an error that the
            case permits; "absent" if Keras has no such option or class.
        largest: The largest difference: 0 if exact, infinite if there is no result.
        details: Descriptions of the differences, or the error.
    """

    status: str
    largest: float = 0.0
    details: tuple[str, ...] = ()


def judge(question: Question) -> Verdict:
    """Runs a case in this process, and compares it with its reference."""
    from tests.conformance import engines, feeds, results
    from tests.conformance.all_cases import ALL_CASES
    from tests.programs import engines as program_engines
    from tests.programs.program import Program
    from tfdist.errors import TfdistError

    case, num_replicas = ALL_CASES[question.case], question.num_replicas
    plain = question.engine in (KERAS, KERAS_EVEN)
    if plain and case.accumulate > 1:
        return Verdict("absent")
    try:
        if question.engine == KERAS_EVEN:
            case = feeds.even(case, num_replicas)
            reference = engines.one_device(case)
        elif isinstance(case, Program):
            reference = program_engines.reference(case.name)
        else:
            reference = engines.expected(case.name)
    except AttributeError as error:  # an older Keras has no such class
        if not getattr(error.obj, "__name__", "").startswith("keras."):
            raise
        return Verdict("absent", 0.0, (str(error),))
    try:
        if plain:
            result = engines.keras_mirrored(case, num_replicas)
        elif question.engine in LAYOUTS:
            layout = _layout(question.engine, num_replicas)
            result = _group(layout.processes).train(layout, case.name)
        elif isinstance(case, Program):
            result = program_engines.tfdist(case, question.engine, num_replicas)
        else:
            result = engines.tfdist(case, question.engine, num_replicas)
    except Exception as error:
        may_refuse = engines.may_refuse(case, question.engine, num_replicas)
        refused = may_refuse and isinstance(error, TfdistError)
        first_line = (str(error).strip() or "no message").splitlines()[0]
        if question.engine in LAYOUTS and not isinstance(error, TfdistError):
            _restart(_layout(question.engine, num_replicas))
            first_line = (str(error).strip() or "no message").splitlines()[-1]
        status = "refused" if refused else "crash"
        return Verdict(status, math.inf, (f"{type(error).__name__}: {first_line}",))
    differences = results.compare(result, reference, case)
    if not differences:
        return Verdict("exact")
    return Verdict("wrong", max(d.size for d in differences), tuple(map(str, differences)))


def limit(question: Question) -> float:
    """Returns after how many seconds the process that runs a case is killed."""
    other = GROUP_SECONDS if question.engine in LAYOUTS else TIMEOUT_SECONDS
    return PROGRAM_SECONDS if question.case in PROGRAMS else other


def _layout(strategy: str, num_workers: int) -> Layout:
    return next(one for one in LAYOUTS[strategy] if one.num_workers == num_workers)


@functools.cache
def _group(processes: str) -> Group:
    """Returns the worker processes of some layouts, which end with this process."""
    layouts = [one for layouts in LAYOUTS.values() for one in layouts]
    return Group(next(one for one in layouts if one.processes == processes))


def _restart(layout: Layout) -> None:
    """Stops the workers of a layout, which a failed case may have left in an inconsistent state."""
    with suppress(Exception):
        _group(layout.processes).stop()
    _group.cache_clear()


def _serve(connection: Connection) -> None:
    from tfdist.upstream.keras_model import use_xla_by_default_if

    start_tensorflow()
    # On a GPU, Keras compiles even models that did not request XLA, and the reference would round
    # differently.
    with use_xla_by_default_if(lambda model: False):
        for question in iter(connection.recv, None):
            connection.send(judge(question))


class _Judge:
    """A subprocess that runs cases, replaced by a new one after a crash or time-out."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None

    def ask(self, question: Question) -> Verdict:
        """Runs a case in the subprocess."""
        if self._process is None:
            self._start()
        seconds = limit(question)
        self._connection.send(question)
        try:
            if not self._connection.poll(seconds):
                self.stop()
                return Verdict("hang", math.inf, (f"no answer in {seconds:.0f} seconds",))
            verdict = self._connection.recv()
        except (EOFError, ConnectionError):
            self.stop()
            return Verdict("crash", math.inf, ("the process died",))
        if verdict.status == "crash" and question.engine in (KERAS, KERAS_EVEN):
            self.stop()  # its MirroredStrategy may be in an inconsistent state
        return verdict

    def _start(self) -> None:
        self._connection, theirs = _SERVER.Pipe()
        self._process = _SERVER.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """Kills the subprocess."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def run_all(
    questions: Iterable[Question], jobs: int, progress: Callable[[Question, Verdict], None]
) -> dict[Question, Verdict]:
    """Runs cases in several subprocesses.

    Returns:
        The verdicts, in the order of `questions`.
    """
    by_case: dict[str, list[Question]] = collections.defaultdict(list)
    for question in questions:
        by_case[question.case].append(question)
    local, judges = threading.local(), []

    def ask_case(case: str) -> dict[Question, Verdict]:
        if not hasattr(local, "judge"):
            local.judge = _Judge()
            judges.append(local.judge)
        verdicts = {}
        for question in by_case[case]:  # in one subprocess, which caches the reference
            verdicts[question] = local.judge.ask(question)
            progress(question, verdicts[question])
        return verdicts

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return {q: v for verdicts in pool.map(ask_case, by_case) for q, v in verdicts.items()}
    finally:
        for judge_ in judges:
            judge_.stop()
