"""Why tests of Keras fail through a Trainer, where that is known."""

from __future__ import annotations

#: By a part of the test's name and a part of its error: what a Trainer does otherwise.
REASONS: list[tuple[str, str, str]] = []


def reason_of(test: str, error: str) -> str | None:
    """Returns why a test fails; None: that is not known."""
    found = (why for name, words, why in REASONS if name in test and words in error)
    return next(found, None)
