"""What rank 0 does for all workers: they have its result, or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tfdist.errors import ConfigurationError, TfdistError

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy

_FAILED, _DONE = "!", "="


def once(strategy: Strategy, make: Callable[[], str]) -> str:
    """Calls `make` on rank 0 and returns its text on every worker.

    Raises:
        TfdistError: `make` raised it: the same one on rank 0, its message on the others.
    """
    error, text = None, ""
    if strategy.is_chief:
        try:
            text = _DONE + make()
        except TfdistError as raised:
            error, text = raised, _FAILED + str(raised)
    told = strategy.broadcast_text(text)
    if error is not None:
        raise error
    if told.startswith(_FAILED):
        raise ConfigurationError(told.removeprefix(_FAILED))
    return told.removeprefix(_DONE)
