"""Known reasons why tests of Keras fail through a Trainer."""

from __future__ import annotations

_ONE_ROW = (
    "training on batches with fewer rows than replicas is refused, because some replicas would be "
    "idle; --strategy one_device runs the test with one replica"
)
_OWN_SCOPE = (
    "the test builds and trains in a tf.distribute scope, whose mirrored variables a Trainer's "
    "replicas do not use; the Trainer rebuilds the model without them"
)
_SUMMARY = (
    "a summary that a layer writes is lost under `towers`, whose threads have no default writer; "
    "--strategy one_device writes it"
)

#: Part of the test's name, part of its error, and the difference in a Trainer that explains it.
REASONS: list[tuple[str, str, str]] = [
    ("", "A global batch of 1 rows has fewer rows than 2 replicas", _ONE_ROW),
    ("test_swap_ema_weights_with_tf_distribute", "__array__", _OWN_SCOPE),
    ("test_custom_summary", "tag='custom_summary'", _SUMMARY),
]


def reason_of(test: str, error: str) -> str | None:
    """Returns why a test fails, or None if the reason is unknown."""
    found = (why for name, words, why in REASONS if name in test and words in error)
    return next(found, None)
