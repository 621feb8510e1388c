"""Pools of worker processes that train a case together."""

from __future__ import annotations

import dataclasses
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.commands import require_horovod
from tfdist.cluster import is_chief
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.errors import LaunchError, TfdistError
from tfdist.strategies import STRATEGIES

if TYPE_CHECKING:
    from tests.conformance.results import Result

#: Horovod polls for work every so many milliseconds. At the default of 1 ms, three idle processes
#: use more than half a core.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_CYCLE_TIME": "10"}
#: Time-out of an answer in seconds. On a busy machine the slowest case takes 50 s.
SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Layout:
    """The processes of a group.

    Attributes:
        strategy: Name of the strategy in tfdist, and which of `engines.OPTIONS` it runs with.
        num_workers: Number of processes.
        num_devices: Logical CPU devices of each process, or workers of a parameter server's
            in-process cluster.
        via: Launcher of the processes, as in `WorkerPool`.
    """

    strategy: str
    num_workers: int
    num_devices: int = 1
    via: str = "processes"

    @property
    def needs_horovod(self) -> bool:
        """Whether Horovod connects the processes."""
        name, _, variant = self.strategy.partition(" ")
        by_horovod = STRATEGIES[name].by_horovod
        return bool(self.via) and by_horovod and not variant.endswith("over TensorFlow")

    @property
    def processes(self) -> str:
        """Name of the processes that train it; layouts with the same name share them.

        TensorFlow joins a process to one cluster with the same devices for all strategies, and
        servers belong to one strategy.
        """
        if not self.via or "servers" in self.strategy:
            return str(self)
        if self.needs_horovod:
            return f"Horovod-{self.via}-{self.num_workers}"
        return f"TensorFlow-{self.via}-{self.num_workers}x{self.num_devices}"

    def __str__(self) -> str:
        devices = f"x{self.num_devices}" if self.num_devices > 1 else ""
        return (
            f"{self.strategy.replace(' ', '-')}-{self.via or 'alone'}-{self.num_workers}{devices}"
        )


#: Layouts that train every case, by strategy.
LAYOUTS: dict[str, list[Layout]] = {}
for _layout in (
    Layout("horovod", 2, via="mpirun"),
    Layout("horovod", 3),
    Layout("multi_worker", 2),
    Layout("multi_worker", 3),
    Layout("multi_worker", 2, num_devices=2),
    Layout("sharded optimizer over processes", 2),
    Layout("sharded gradients over processes", 2),
    Layout("sharded gradients over processes", 3),
    Layout("sharded parameters over processes", 2, via="mpirun"),
    Layout("sharded parameters over processes", 3),
    Layout("pipeline over processes", 2, num_devices=2, via="mpirun"),
    Layout("horovod in buckets", 2, via="mpirun"),
    Layout("horovod in buckets", 3),
    Layout("multi_worker in buckets", 2),
    Layout("tensor_parallel over processes", 2, num_devices=2, via="mpirun"),
    Layout("sharded optimizer over TensorFlow", 2),
    Layout("sharded gradients over TensorFlow", 2),
    Layout("sharded parameters over TensorFlow", 2),
    Layout("pipeline over TensorFlow", 2, num_devices=2),
    Layout("tensor_parallel over TensorFlow", 2, num_devices=2),
    Layout("sharded parameters on a mesh", 2, num_devices=2, via="mpirun"),
    Layout("sharded gradients on a mesh over TensorFlow", 2, num_devices=2),
    Layout("pipeline on a mesh", 2, num_devices=2, via="mpirun"),
    Layout("tensor_parallel on a mesh over TensorFlow", 2, num_devices=2),
    Layout("tensor_parallel split activations on a mesh over TensorFlow", 2, num_devices=2),
    Layout("pipeline on servers", 1, num_devices=2, via=""),
    Layout("tensor_parallel on servers", 1, num_devices=2, via=""),
    Layout("sharded optimizer on servers", 1, num_devices=2, via=""),
    Layout("sharded gradients on servers", 1, num_devices=2, via=""),
    Layout("sharded parameters on servers", 1, num_devices=2, via=""),
    Layout("pipeline on servers over processes", 2, num_devices=2),
    Layout("parameter_server", 1, via=""),
):
    LAYOUTS.setdefault(_layout.strategy, []).append(_layout)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Result of one worker: a value, or the error that it raised.

    Attributes:
        value: The return value; None after an error.
        error: Traceback of the error.
        declined: Message of the error, if it is a TfdistError.
    """

    value: Any = None
    error: str = ""
    declined: str = ""


class AnsweringPool(WorkerPool):
    """Workers that survive an error: they answer with its traceback and keep running.

    `ask` returns the `Answer` of each. The running test is skipped if they need Horovod and it is
    not installed.
    """

    def __init__(
        self, layout: Layout, make_handler: Callable[..., Callable[..., Any]], *arguments: Any
    ) -> None:
        if layout.needs_horovod:
            require_horovod()
        self.layout = layout
        super().__init__(
            _catching_errors, make_handler, *arguments,
            num_workers=layout.num_workers, via=layout.via, environ=QUIET, timeout_seconds=SECONDS,
        )  # fmt: skip


def values_of(answers: Sequence[Answer]) -> list[Any]:
    """Returns the value of each answer, and fails if one is an error."""
    failed = [answer.error for answer in answers if answer.error]
    assert not failed, "\n".join(failed)
    return [answer.value for answer in answers]


def _catching_errors(make_handler: Callable[..., Callable[..., Any]], *arguments: Any) -> Callable:
    """Runs in a worker: wraps the result of `make_handler` so that it returns an `Answer`."""
    answer = make_handler(*arguments)

    def catching_errors(*question: Any) -> Answer:
        try:
            return Answer(answer(*question))
        except Exception as error:
            declined = str(error) if isinstance(error, TfdistError) else ""
            return Answer(None, traceback.format_exc(), declined)

    return catching_errors


def training(strategy: str, num_devices: int) -> Callable[[str, int, str, str], Result]:
    """Runs in a worker: returns a function that trains a case or a program, given its name.

    Creates a strategy first, because the processes connect and the devices are fixed before
    TensorFlow is initialized. The function gets a strategy, its number of devices, and a folder for
    the files of callbacks, which all workers share.
    """
    from tests.conformance import engines

    engines.create_strategy(strategy, num_devices)
    from tests.conformance.cases import CASES
    from tests.programs import engines as program_engines
    from tests.programs.programs import PROGRAMS

    def train(strategy: str, num_devices: int, name: str, folder: str) -> Result:
        if name in PROGRAMS:
            return program_engines.tfdist(PROGRAMS[name], strategy, num_devices, folder)
        if is_chief():
            CASES[name].build()  # so that Keras numbers names differently on each rank
        return engines.tfdist(CASES[name], strategy, num_devices)

    return train


class Group(AnsweringPool):
    """The processes of a layout, which train cases and programs. A context manager.

    They also train the layouts of `LAYOUTS` that share these processes.
    """

    def __init__(self, layout: Layout) -> None:
        layouts = [one for layouts in LAYOUTS.values() for one in layouts]
        sharing = [layout, *(one for one in layouts if one.processes == layout.processes)]
        most = max(sharing, key=lambda one: one.num_devices)
        super().__init__(most, training, most.strategy, most.num_devices)

    def train(self, layout: Layout, case: str) -> Result:
        """Trains a case on all workers, and returns their common result.

        Raises:
            TfdistError: If all workers refuse the case.
            AssertionError: If a worker failed, or the workers' results are not bitwise identical.
        """
        try:
            with tempfile.TemporaryDirectory() as folder:
                answers = self.ask(layout.strategy, layout.num_devices, case, folder)
        except LaunchError as error:  # a TfdistError, but not one that refuses the case
            raise AssertionError(f"{layout}: {error}") from None
        if all(answer.declined for answer in answers):
            raise TfdistError(answers[0].declined)
        first, *others = values_of(answers)
        for rank, other in enumerate(others, 1):
            np.testing.assert_equal(
                dataclasses.asdict(other), dataclasses.asdict(first), f"rank {rank} against rank 0"
            )
        return first
