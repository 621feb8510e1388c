"""`--deterministic`: two runs of one command on one machine are bitwise identical."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from tfdist.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from tfdist.strategies import Strategy


#: Operations with state: a number depends on how many were drawn before, in any thread.
_STATEFUL = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBoxV2",
        "TruncatedNormal",
    }
)


def enable() -> None:
    """Makes operations deterministic; call it before the first operation, after seeds are set.

    An operation without a deterministic version raises an error. In `tf.data`, parallel calls
    return their results in order.
    """
    tf.config.experimental.enable_op_determinism()


def check(strategy: Strategy) -> None:
    """Checks that a strategy makes the same steps in every run.

    Raises:
        ConfigurationError: Its workers are asynchronous.
    """
    if not strategy.repeatable:
        raise ConfigurationError(
            f"--deterministic: the workers of {strategy.name} make steps as they come, in another "
            "order in every run: take another strategy."
        )


def check_data(data: tf.data.Dataset, function: str) -> None:
    """Checks that a data set draws no random numbers from state that threads share.

    In a parallel `interleave`, the order in which threads draw differs between runs, even with
    deterministic operations.

    Args:
        data: A data set of a recipe.
        function: Name of the function that returned it.

    Raises:
        DataError: The data set does so.
    """
    variant = tf.data.experimental.to_variant(data)
    graph = tf.compat.v1.GraphDef()
    graph.ParseFromString(
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=1, strip_device_assignment=True
        ).numpy()
    )
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    if drawn := sorted({node.op for node in nodes} & _STATEFUL):
        raise DataError(
            f"--deterministic: {function} draws numbers by {', '.join(drawn)}, which depend on "
            "how many another thread has drawn: draw them by tf.random.stateless_* from a seed of "
            "each record, as augment_fn of pipelines.read is given one."
        )
