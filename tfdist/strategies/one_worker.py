"""What a strategy asks of all workers, where this process is the only one.

`several_workers` has the same for several. Nothing here knows of replicas, data or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np


class OneWorker:
    """A process that trains by itself.

    Attributes:
        num_workers: Processes that train together.
        rank: This process among them.
        is_chief: Whether this process writes and talks.
    """

    num_workers = 1
    rank = 0

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes and talks."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its host."""
        return 0

    @property
    def stops_together(self) -> bool:
        """Whether other processes make each step too, so that none may stop by itself."""
        return False

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """Returns numbers of all workers, in each of them; called outside of any graph.

        Args:
            numbers: As many on every worker.

        Returns:
            Shape `(num_workers, len(numbers))`, float64.
        """
        return np.asarray([numbers], np.float64)

    def gather_bytes(self, own: np.ndarray) -> list[np.ndarray]:
        """Returns the bytes of all workers, in each of them; called outside of any graph.

        Args:
            own: uint8, of one dim; as many as each worker likes.
        """
        return [own]

    def broadcast_text(self, text: str) -> str:
        """Returns the text of rank 0, on every worker; called outside of any graph."""
        return text

    def add_up(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the sums of arrays over all workers; called outside of any graph.

        Args:
            arrays: Of floats, of the same shapes and dtypes on every worker.
        """
        return list(arrays)

    def broadcast(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the arrays of rank 0, on every worker; called outside of any graph."""
        return dict(arrays)

    def barrier(self) -> None:
        """Waits until every worker has come here."""

    def collective_section(self) -> AbstractContextManager[None]:
        """Within it, all processes are known to run the same code."""
        return nullcontext()

    def translate_errors(self) -> AbstractContextManager[None]:
        """Within it, an error that a lost process causes is raised as one that says so."""
        return nullcontext()
