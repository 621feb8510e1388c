"""Asks engines for cases in processes of their own, since plain Keras may crash or hang there."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import multiprocessing
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from tests import start_tensorflow
from tests.conformance.layouts import LAYOUTS, Group
from tests.programs.programs import PROGRAMS

TIMEOUT_SECONDS = 120.0
PROGRAM_SECONDS = 1800.0  # a network of some hundred layers is traced in minutes
# Processes are forked from one that has imported TensorFlow, which takes seconds, but has not
# started it, after which it cannot be forked.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.conformance.engines"])

KERAS, KERAS_EVEN = "keras", "keras-even"


@dataclasses.dataclass(frozen=True)
class Question:
    """A case for an engine.

    Attributes:
        case: its name.
        engine: a strategy of tfdist; `KERAS` for plain Keras mirrored; `KERAS_EVEN` for that on
            rows cut to batches that divide by the replicas, which shows what else goes wrong.
        num_replicas: how many.
    """

    case: str
    engine: str
    num_replicas: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a question.

    Attributes:
        status: "exact", "wrong", "crash" or "hang"; "refused" where tfdist declines a case by an
            error as it may; "absent" where plain Keras has no such option.
        largest: the largest difference, 0 where all is exact and infinite where nothing came.
        details: the differences in words, or the error.
    """

    status: str
    largest: float = 0.0
    details: tuple[str, ...] = ()


def judge(question: Question) -> Verdict:
    """Answers a question in this process."""
    from tests.conformance import engines, feeds, results
    from tests.conformance.asked import ASKED
    from tests.programs import engines as of_programs
    from tests.programs.program import Program
    from tfdist.errors import TfdistError

    case, num_replicas = ASKED[question.case], question.num_replicas
    plain = question.engine in (KERAS, KERAS_EVEN)
    if plain and case.accumulate > 1:
        return Verdict("absent")
    if question.engine == KERAS_EVEN:
        case = feeds.even(case, num_replicas)
        reference = engines.one_device(case)
    elif isinstance(case, Program):
        reference = of_programs.reference(case.name)
    else:
        reference = engines.references(case.name).right
    try:
        if plain:
            result = engines.keras_mirrored(case, num_replicas)
        elif question.engine in LAYOUTS:
            result = _group(question.engine, num_replicas).train(case.name)
        elif isinstance(case, Program):
            result = of_programs.tfdist(case, question.engine, num_replicas)
        else:
            result = engines.tfdist(case, question.engine, num_replicas)
    except Exception as error:
        may_refuse = engines.may_refuse(case, question.engine, num_replicas)
        refused = may_refuse and isinstance(error, TfdistError)
        first_line = (str(error).strip() or "no message").splitlines()[0]
        status = "refused" if refused else "crash"
        return Verdict(status, math.inf, (f"{type(error).__name__}: {first_line}",))
    differences = results.compare(result, reference, case)
    if not differences:
        return Verdict("exact")
    return Verdict("wrong", max(d.size for d in differences), tuple(map(str, differences)))


@functools.cache
def _group(strategy: str, num_workers: int) -> Group:
    """The processes that this one asks; they end when it does."""
    return Group(next(o for o in LAYOUTS[strategy] if o.num_workers == num_workers))


def _serve(connection: Connection) -> None:
    from tfdist.upstream.keras_model import xla_on_demand

    start_tensorflow()
    # On a GPU Keras compiles what does not ask for it with XLA, and the reference rounds otherwise.
    with xla_on_demand():
        for question in iter(connection.recv, None):
            connection.send(judge(question))


class _Judge:
    """A process that answers questions, replaced by a new one whenever it may be broken."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None

    def ask(self, question: Question) -> Verdict:
        """Answers a question."""
        if self._process is None:
            self._start()
        seconds = PROGRAM_SECONDS if question.case in PROGRAMS else TIMEOUT_SECONDS
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
            self.stop()  # its one MirroredStrategy may be left half way
        return verdict

    def _start(self) -> None:
        self._connection, theirs = _SERVER.Pipe()
        self._process = _SERVER.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def ask_all(
    questions: Iterable[Question], jobs: int, progress: Callable[[Question, Verdict], None]
) -> dict[Question, Verdict]:
    """Answers questions in several processes.

    Args:
        questions: what to ask.
        jobs: how many processes.
        progress: told of every answer as it comes.

    Returns:
        The answers, in the order of the questions.
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
        for question in by_case[case]:  # in one process, which keeps the reference
            verdicts[question] = local.judge.ask(question)
            progress(question, verdicts[question])
        return verdicts

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return {q: v for verdicts in pool.map(ask_case, by_case) for q, v in verdicts.items()}
    finally:
        for judge_ in judges:
            judge_.stop()
