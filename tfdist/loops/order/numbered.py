"""Data whose passes are told their number, and so begin anywhere."""

from __future__ import annotations

from typing import Any

from tfdist.loops.order.passes import DataOrder, Distribute


class NumberedOrder(DataOrder):
    """Nothing is begun ahead, in vain or to be left out: no pass depends on those before it."""

    def begin_ahead(self, distribute: Distribute) -> None:
        pass

    def begin_in_vain(self) -> None:
        pass

    def leave_out(self) -> None:
        pass

    def state_of(self, iterator: Any) -> Any:
        return None
