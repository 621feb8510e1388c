"""What each device or process keeps of a model's state: the plan, before anything is moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.groups.base import shard_sizes
from tfdist.strategies import mirrored_variables
from tfdist.upstream import keras_model
from tfdist.upstream.features import existing
from tfdist.upstream.keras_layers import frozen_weights
from tfdist.upstream.keras_optimizers import custom_step_of, is_of_keras
from tfdist.upstream.keras_variables import ShardedVariable

#: What is sharded, in words.
WHAT = {
    "optimizer": "optimizer state (ZeRO 1)",
    "gradients": "optimizer state and gradients (ZeRO 2)",
    "parameters": "optimizer state, gradients and weights (ZeRO 3)",
}

#: Keras's optimizers that update each element independently of all others. Not among them: Lamb
#: (norms of whole weights), Muon (products of matrices), Adafactor (means of rows and columns).
#: Subclasses may compute anything.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    *existing(keras.optimizers, "ScheduleFreeAdamW"),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the state of each weight goes.

    Attributes:
        cut: Trained weights of which each owner keeps a shard.
        homes: The other ones, each with the owner that has least so far, for its state.
        frozen: Frozen and quantized weights of which each owner keeps a shard.
        reason_whole: Why no weight is sharded; None: some may be.
    """

    cut: list[keras.Variable]
    homes: list[tuple[keras.Variable, str]]
    frozen: list[keras.Variable]
    reason_whole: str | None

    def describe(self, num_owners: int, rest_is: str) -> str:
        """Returns in words what share of the parameters is sharded, and where the rest is."""
        num_frozen, num_cut = (
            sum(weight.shape.num_elements() for weight in weights)
            for weights in (self.frozen, [*self.cut, *self.frozen])
        )
        total = num_cut + sum(weight.shape.num_elements() for weight, _ in self.homes)
        text = f"{num_cut / max(total, 1):.1%} of {total:,} parameters in {num_owners} shards"
        if self.frozen:
            text += f", {num_frozen:,} of them frozen"
        if self.homes:
            text += f", the others whole, {rest_is}"
        return text + (f" ({self.reason_whole})" if self.reason_whole else "")

    def bytes_by_owner(
        self, owners: Sequence[str], state: float, copies_weights: bool, is_rest_copied: bool
    ) -> dict[str, int]:
        """Returns the bytes of weights and optimizer state that each owner will hold.

        If each owner has a full copy of the weights to read, it holds the shard that the optimizer
        updates in addition, like ZeRO's master weights.

        Args:
            owners: All devices or processes.
            state: Numbers that the optimizer keeps for each parameter.
            copies_weights: Whether each owner has the full weights.
            is_rest_copied: Whether each owner has all state of what is not sharded.
        """
        held = dict.fromkeys(owners, 0.0)
        for weight, of_weight in [*((w, state) for w in self.cut), *((w, 0) for w in self.frozen)]:
            size = tf.as_dtype(weight.dtype).size
            sizes = shard_sizes(weight.shape.num_elements(), len(owners))
            for owner, num_bytes_of_shards in zip(owners, sizes, strict=True):
                held[owner] += size * num_bytes_of_shards * (1 + of_weight)
        for weight, home in self.homes:
            for owner in owners if is_rest_copied else [home]:
                held[owner] += num_bytes(weight) * (state if copies_weights else 1 + state)
        if copies_weights:
            whole = sum(map(num_bytes, self.cut)) + sum(num_bytes(w) for w, _ in self.homes)
            held = {
                owner: num_bytes_of_shards + whole for owner, num_bytes_of_shards in held.items()
            }
        return {owner: round(num_bytes_of_shards) for owner, num_bytes_of_shards in held.items()}


def plan(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    owners: Sequence[str],
    smallest: int,
    cuts_weights: bool,
) -> Plan:
    """Returns what happens to each weight; the same result each time.

    Args:
        model: A built model.
        optimizers: Its optimizers, without a `LossScaleOptimizer` around them.
        owners: The devices or processes that share the state.
        smallest: The smallest number of elements of a weight that is sharded.
        cuts_weights: Whether weights themselves are sharded, not only what belongs to them.
    """
    reason, sparse = reason_whole(model, optimizers), tables(model)
    frozen = frozen_to_cut(model, smallest) if cuts_weights else []
    load, cut, homes = dict.fromkeys(owners, 0), [], []
    for weight in sorted(model.trainable_variables, key=num_bytes, reverse=True):
        if reason is None and id(weight) not in sparse and can_be_cut(weight, smallest):
            cut.append(weight)
            continue
        home = min(owners, key=load.__getitem__)
        load[home] += num_bytes(weight)
        homes.append((weight, home))
    return Plan(cut, homes, frozen, reason)


# ---- which variables can be sharded ----


def frozen_to_cut(model: keras.Model, smallest: int) -> list[keras.Variable]:
    """Returns the frozen and quantized weights to shard, which are gathered and never reduced.

    Args:
        model: A built model.
        smallest: The smallest number of elements of a weight that is sharded.
    """
    if custom_step_of(model, training=True) is not None:
        return []
    frozen = frozen_weights(model)
    return [v for v in frozen if v.constraint is None and v.shape.num_elements() >= smallest]


def reason_whole(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]
) -> str | None:
    """Returns why no weight can be sharded; None: those that `can_be_cut` accepts can."""
    if (step := custom_step_of(model, training=True)) is not None:
        return f"{step} may do anything with them"
    for optimizer in optimizers:
        if type(optimizer) not in ELEMENTWISE or not is_of_keras(optimizer):
            return f"{type(optimizer).__name__} may not compute each element by itself"
        if optimizer.gradient_accumulation_steps:
            return "the optimizer accumulates whole gradients"
    inputs = getattr(model, "inputs", None) or []
    if any(getattr(tensor, "sparse", False) for tensor in inputs):
        return "sparse inputs give sparse gradients"
    return None


def tables(model: keras.Model) -> set[int]:
    """Returns the ids of weights with sparse gradients: those of Embeddings that look up.

    To shard them, the gradients would have to be made dense, and optimizers treat these
    differently. The gradient of a `ReversibleEmbedding`'s own weight for logits is dense.
    """
    layers = keras_model.flatten_layers(model)
    embeddings = [layer for layer in layers if isinstance(layer, keras.layers.Embedding)]
    for_logits = {id(getattr(layer, "reverse_embeddings", None)) for layer in embeddings}
    return {id(v) for layer in embeddings for v in layer.variables} - for_logits


def can_be_cut(weight: keras.Variable, smallest: int) -> bool:
    """Returns whether a weight has enough elements, and nothing needs all of them at once."""
    is_float = tf.as_dtype(weight.dtype).is_floating
    sees_all = weight.constraint is not None or weight.overwrite_with_gradient
    return is_float and not sees_all and weight.shape.num_elements() >= smallest


# ---- sizes ----


def num_bytes(variable: keras.Variable) -> int:
    """Returns the bytes of all elements of a variable."""
    return variable.shape.num_elements() * tf.as_dtype(variable.dtype).size


def state_of(optimizer: keras.optimizers.Optimizer) -> float | None:
    """Returns how many numbers an optimizer keeps for each parameter, from a small matrix.

    Returns None if its configuration does not make a second optimizer.
    """
    try:
        twin = type(optimizer).from_config(optimizer.get_config())
        with tf.device("CPU:0"):
            weight = keras.Variable(tf.zeros([64, 64]))
            twin.build([weight])
    except Exception:  # a user's optimizer may raise anything; the figure is then left out
        return None
    others = sum(v.shape.num_elements() for v in twin.variables if v.shape.rank)
    return others / weight.shape.num_elements()


def bytes_by_device(variables: Iterable[keras.Variable]) -> dict[str, int]:
    """Returns the bytes of variables, their shards and copies, by the short name of a device."""
    held: dict[str, int] = {}
    for variable in variables:
        for tensor in tensors_of(variable):
            name = connection.short(tensor.device)
            held[name] = held.get(name, 0) + tensor.shape.num_elements() * tensor.dtype.size
    return held


def tensors_of(variable: keras.Variable) -> list[tf.Variable]:
    """Returns the TensorFlow variables of a Keras variable in this process."""
    is_cut = isinstance(variable, ShardedVariable)
    parts = variable.parts if is_cut else []
    if is_cut and not variable.is_whole:
        return parts
    return [variable.value, *mirrored_variables.copies_of(variable.value).values(), *parts]
