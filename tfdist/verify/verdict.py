"""What came of a trial. Imports no TensorFlow."""

from __future__ import annotations

from typing import NamedTuple

from tfdist.verify.results import Difference


class Verdict(NamedTuple):
    """What came of a trial; the same on every worker.

    Attributes:
        strategy: Its name.
        num_workers: Processes.
        num_replicas: In all of them.
        differences: Of the worker that is furthest off, as its rank 0 sees them, the worst first.
        off: The ranks that differ from plain Keras by more than is tolerated.
        apart: The ranks of which some copy of the weights is not rank 0's to the bit.
    """

    strategy: str
    num_workers: int
    num_replicas: int
    differences: list[Difference]
    off: list[int]
    apart: list[int]

    @property
    def passed(self) -> bool:
        """Whether the strategy trains to the numbers of one device."""
        return not self.off and not self.apart
