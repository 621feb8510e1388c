"""Known reasons why tests of Keras fail through a Trainer."""

from __future__ import annotations

_OWN_SCOPE = (
    "the test builds and trains in a tf.distribute scope, whose mirrored variables a Trainer's "
    "replicas do not use; the Trainer rebuilds the model without them"
)

_TRACED_BY_REPLICA = (
    "the test counts the calls of its train_step: a Trainer traces it once for each replica, after "
    "two dry runs that create its variables and infer its reductions"
)

#: Part of the test's name, part of its error, and the difference in a Trainer that explains it.
REASONS: list[tuple[str, str, str]] = [
    ("test_swap_ema_weights_with_tf_distribute", "__array__", _OWN_SCOPE),
    ("test_retracing", "not less than or equal to 2", _TRACED_BY_REPLICA),
]


def reason_of(test: str, error: str) -> str | None:
    """Returns why a test fails, or None if the reason is unknown."""
    result = (why for name, words, why in REASONS if name in test and words in error)
    return next(result, None)
