"""How fast steps go, and for how long they wait for data."""

from __future__ import annotations

from tfdist.loops.feed import Feed
from tfdist.loops.observers import Call, Observer


class Throughput(Observer):
    """Throughput of the epoch that runs, for progress lines and logs.

    Attributes:
        examples_per_second: Rows of global batches, without the first call, which compiles.
        seconds_per_step: Of the same calls.
        data_wait_share: Part of the time, 0 to 1, in which the devices waited for data.
        steps_of_epoch: All of them so far.
        rows_of_epoch: Of all their global batches.
        last_call: The last call of all; None before the first.
    """

    def __init__(self) -> None:
        self.examples_per_second = 0.0
        self.seconds_per_step = 0.0
        self.data_wait_share = 0.0
        self.steps_of_epoch, self.rows_of_epoch = 0, 0
        self.last_call: Call | None = None
        self._compiled = False
        self._seconds, self._rows, self._waited, self._steps = 0.0, 0, 0.0, 0

    def begin_epoch(self, feed: Feed) -> None:
        self.steps_of_epoch, self.rows_of_epoch = 0, 0
        self._seconds, self._rows, self._waited, self._steps = 0.0, 0, 0.0, 0

    def end_call(self, call: Call) -> None:
        self.last_call = call
        self.steps_of_epoch += int(call.made.num_steps)
        self.rows_of_epoch += int(call.made.num_rows)
        if not self._compiled:
            self._compiled = True
            return
        self._seconds += call.seconds
        self._rows += int(call.made.num_rows)
        self._waited += float(call.made.seconds_waited)
        self._steps += int(call.made.num_steps)
        self.seconds_per_step = self._seconds / max(self._steps, 1)
        self.examples_per_second = self._rows / max(self._seconds, 1e-9)
        self.data_wait_share = min(1.0, self._waited / max(self._seconds, 1e-9))
