"""Why tests of Keras fail through a Trainer, where that is known."""

from __future__ import annotations

_ONE_ROW = (
    "training on batches of fewer rows than replicas is refused: some would never have work; "
    "--strategy one_device asks the test with one replica"
)
_OWN_SCOPE = (
    "the test builds and trains within a tf.distribute scope of its own, whose copies of the "
    "variables a Trainer's replicas do not take; a model handed over is rebuilt without them"
)
_SUMMARY = (
    "a summary that a layer writes itself is lost in the replicas of `towers`, whose threads have "
    "no writer; one device, which --strategy one_device asks, writes it"
)

#: By a part of the test's name and a part of its error: what a Trainer does otherwise.
REASONS: list[tuple[str, str, str]] = [
    ("", "A global batch of 1 rows has fewer rows than 2 replicas", _ONE_ROW),
    ("test_swap_ema_weights_with_tf_distribute", "__array__", _OWN_SCOPE),
    ("test_custom_summary", "tag='custom_summary'", _SUMMARY),
]


def reason_of(test: str, error: str) -> str | None:
    """Returns why a test fails; None: that is not known."""
    found = (why for name, words, why in REASONS if name in test and words in error)
    return next(found, None)
