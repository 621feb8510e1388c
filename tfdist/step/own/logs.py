"""What a user's step returned, as Keras logs it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.errors import UnsupportedModelError


def flat_logs(logs: Any) -> dict[str, Any]:
    """Returns what a step returned as Keras logs it: dictionaries inside of it laid open.

    Raises:
        UnsupportedModelError: It is no dictionary of numbers.
    """
    found: dict[str, Any] = {}
    for name, value in (logs or {}).items() if isinstance(logs or {}, dict) else [("", logs)]:
        if isinstance(value, dict):
            found |= flat_logs(value)
            continue
        if not name or not np.size(getattr(value, "shape", ())) == 0:
            raise UnsupportedModelError(
                f"The step returns {name or type(value).__name__!r}, which is no number: return a "
                "dictionary of scalars, or metrics' results."
            )
        found[name] = value
    return found
