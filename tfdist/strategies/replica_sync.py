"""How the variables of replicas stay equal while user code runs between training steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class ReplicaSync(Protocol):
    """Keeps the replicas' variables equal while user code runs between training steps."""

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context that notes which variables the code inside may change."""

    def sync_changed(self) -> None:
        """Updates the other replicas, at least for the variables that changed in `watching`."""

    def sync_all(self) -> None:
        """Updates all variables of the other replicas."""


class FullReplicaSync:
    """A `ReplicaSync` that updates every variable each time.

    Args:
        sync: Updates all variables on all replicas.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        self.sync_changed = self.sync_all = sync

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context that notes nothing."""
        return nullcontext()
