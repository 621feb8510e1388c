"""How often what has failed is started again."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tfdist.launcher.child import Failure


class Restarts:
    """Counts failures and preemptions of a run, and says each on standard error.

    Args:
        most: So many failures are followed by a restart, and the next one ends the run. 0: nothing
            is started again, after a preemption neither.

    Attributes:
        failures: That were followed by a restart.
        preemptions: Likewise; they are no failures, and have no limit.
        made: All restarts.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.failures = self.preemptions = self.made = 0

    def allow(self, failure: Failure, counts: bool = True) -> bool:
        """Counts a failure, and returns whether a restart follows.

        Args:
            failure: Or preemption.
            counts: Whether it is one that the limit is for.
        """
        if not self._most or (counts and not failure.preempted and self.failures == self._most):
            return False
        self.made += 1
        if failure.preempted:
            self.preemptions += 1
        elif counts:
            self.failures += 1
        print(
            f"{failure}\nStarting again: restart {self.failures} of {self._most} after failures, "
            f"{self.preemptions} after preemptions.",
            file=sys.stderr,
            flush=True,
        )
        return True


#: Nothing is started again.
NONE = Restarts(0)


def supervised(
    attempt: Callable[[], Failure | None],
    restarts: Restarts,
    note: Callable[[Failure], bool] = lambda _: True,
) -> Failure | None:
    """Makes attempts until one ends well, or may not be followed by another.

    Args:
        attempt: Starts everything anew, on new ports, and waits for its end.
        restarts: The limit.
        note: Hears of each failure; returns whether the limit is for it.

    Returns:
        The last failure, or None.
    """
    while (failure := attempt()) is not None:
        if not restarts.allow(failure, note(failure)):
            return failure
    return None
