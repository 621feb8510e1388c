"""Checks that the replicas of a process do not diverge.

Each replica of `mirrored` updates variables of its own, by the same sums. Code of the user may
update them differently: by their names, by random numbers, or by Python state. Variables are
compared by the sums of their bits, which each device computes itself, before callbacks run, which
change the first replica's variables only.
"""

from __future__ import annotations

import time

from tfdist.errors import UnsupportedModelError
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.epoch import Call, Observer
from tfdist.loops.functions import CompiledFunctions
from tfdist.loops.rank_checks import COST, CheckRanks
from tfdist.strategies.mirrored_variables import first_difference


class ReplicaChecks(Observer):
    """Compares the variables of the replicas after calls of the inner loop.

    After the first call, after the last one of an epoch that `is_last`, and otherwise as often as
    takes at most 1% of the time.

    Args:
        functions: Has the variables.
        mode: `"off"` compares nothing, `"every-call"` after each call.

    Attributes:
        place: The name of the epoch, for messages.
        is_last: Whether it is the last one.
    """

    def __init__(self, functions: CompiledFunctions, mode: CheckRanks) -> None:
        self._functions, self._mode = functions, mode
        self.place, self.is_last = "", False
        self._seconds, self._cost = 0.0, -1.0  # a negative cost makes the first comparison due

    def begin_epoch(self, data: DataHandler) -> None:
        self._num_batches = data.num_batches

    def end_call(self, call: Call) -> None:
        self._seconds += call.seconds
        ends = self.is_last and call.last_step + 1 == self._num_batches
        is_due = ends or self._mode == "every-call" or self._seconds * COST > self._cost
        if self._mode != "off" and is_due:
            self._compare(call.last_step + 1)

    def _compare(self, step: int) -> None:
        began = time.perf_counter()
        groups = self._functions.variables().values()
        different = first_difference([v for g in groups for v in g if v.dtype != "string"])
        self._seconds, self._cost = 0.0, time.perf_counter() - began
        if different is not None:
            raise UnsupportedModelError(
                f"{different.variable.path!r} differs between replicas of this process after step "
                f"{step} of {self.place}, by up to {different.largest:.3g} on "
                f"{different.device}. Code of the model or of its optimizer updates it differently "
                "on each replica: it must not depend on Python state, devices, or random numbers "
                "of its own."
            )
