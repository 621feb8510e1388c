"""Engines that train a case: plain Keras on one device, plain Keras mirrored, and tfdist."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tests.cluster.remote import servers
from tests.conformance import feeds
from tests.conformance.cases import CASES
from tests.conformance.results import Result, collect
from tests.gpu_paths.nccl_stand_in import NcclStandIn
from tests.support.case import Case
from tfdist import cluster, strategies

#: Single-process strategies of tfdist, each with the numbers of replicas that run every case.
STRATEGIES = {
    "one_device": [1],
    "mirrored": [2, 3],
    "mirrored traced once": [2, 3],
    "mirrored hierarchical_copy": [2],
    "mirrored NCCL stand-in": [2],
    "central_storage": [2, 3],
    "towers": [2, 3],
    "pipeline": [2, 4],
    "pipeline interleaved": [2],
    "pipeline zb": [2, 4],
    "tensor_parallel": [2, 3, 4],
    "tensor_parallel split activations": [2, 3],
    "sharded optimizer": [2],
    "sharded gradients": [2],
    "sharded parameters": [2, 3, 4],
}

#: Options of the strategies that run with options, by their names above.
OPTIONS: dict[str, dict[str, Any]] = {
    "mirrored traced once": {"one_trace_from": 0},
    "mirrored hierarchical_copy": {"all_reduce": "hierarchical_copy"},
    "tensor_parallel": {"smallest": 1},
    "tensor_parallel split activations": {"smallest": 1, "split_activations": "rows"},
    "tensor_parallel over processes": {"smallest": 1},
    "pipeline interleaved": {"order": "interleaved"},
    "pipeline zb": {"order": "zb"},
    "pipeline over processes": {"micro_batches": 2},
    # One bucket for each tensor: all gradients of these small models would fit into a single
    # bucket.
    "horovod in buckets": {"bucket_mb": 1e-6},
    "multi_worker in buckets": {"bucket_mb": 1e-6},
    **{
        f"sharded {what}{over}": {"shard": what, "smallest": 1}
        for what in ("optimizer", "gradients", "parameters")
        for over in ("", " over processes")
    },
}
# The same strategies over TensorFlow's collectives instead of Horovod.
OPTIONS |= {
    name.replace("over processes", "over TensorFlow"): options | {"process_group": "tensorflow"}
    for name, options in OPTIONS.items()
    if name.endswith("over processes")
}
# Meshes of two processes with two devices each.
OPTIONS |= {
    "sharded parameters on a mesh": {"mesh": "data=2,shard=2", "smallest": 1},
    "sharded gradients on a mesh over TensorFlow": {
        "mesh": "data=2,shard=2", "process_group": "tensorflow",
        "shard": "gradients", "smallest": 1,
    },
    "pipeline on a mesh": {"mesh": "data=2,pipeline=2", "micro_batches": 2},
    "tensor_parallel on a mesh over TensorFlow": {
        "mesh": "data=2,tensor=2", "process_group": "tensorflow", "smallest": 1,
    },
    "tensor_parallel split activations on a mesh over TensorFlow": {
        "mesh": "data=2,tensor=2", "process_group": "tensorflow", "smallest": 1,
        "split_activations": "rows",
    },
}  # fmt: skip

# Devices of two server processes; over processes, each has one device of its own and one server.
OPTIONS |= {
    name.replace("over processes", "on servers"): options
    for name, options in OPTIONS.items()
    if name.endswith("over processes")
} | {"pipeline on servers over processes": OPTIONS["pipeline on a mesh"]}

#: Cases that pipeline parallelism refuses with an error: models that call their layers in a custom
#: `call`, custom `train_step`s, and models with fewer layers than stages.
_REFUSED_BY_PIPELINE = {
    "adversarial-step-with-noise",
    "loss-scale-overflow",
    "metric-in-call",
    "own-step",
    "own-step-of-pairs",
    "own-step-with-noise",
    "subclassed-unbuilt",
    "tied-weights",
}
#: Programs that pipeline parallelism refuses for the same reasons.
_PROGRAMS_REFUSED_BY_PIPELINE = {
    "generative-normalising-flow",
    "losses-of-logits-extended",
    "reinforcement-actor-critic",
    "reinforcement-clipped-policy",
    "series-traffic",
    "tables-rare-fraud",
    "tables-recommender",
    "text-generative-transformer",
}
#: Programs that call methods of plain Keras on a model whose weights tfdist keeps sharded, and one
#: with a lookup table inside a custom layer, for which plain Keras would get row gradients.
_PROGRAMS_REFUSED_WHEN_SHARDED = {"guides-fit-of-the-model"}
_TABLES_REFUSED_WHEN_SHARDED = {"vision-shifted-windows"}
REFUSED = {
    "pipeline": _REFUSED_BY_PIPELINE | _PROGRAMS_REFUSED_BY_PIPELINE,
    "pipeline zb": _REFUSED_BY_PIPELINE | _PROGRAMS_REFUSED_BY_PIPELINE,
    "pipeline over processes": _REFUSED_BY_PIPELINE,
    "pipeline on a mesh": _REFUSED_BY_PIPELINE,
    "pipeline over TensorFlow": _REFUSED_BY_PIPELINE,
    "pipeline on servers": _REFUSED_BY_PIPELINE,
    "pipeline on servers over processes": _REFUSED_BY_PIPELINE,
    "tensor_parallel": _PROGRAMS_REFUSED_WHEN_SHARDED,
    **{
        f"sharded {what}{over}": _PROGRAMS_REFUSED_WHEN_SHARDED | _TABLES_REFUSED_WHEN_SHARDED
        for what in ("gradients", "parameters")
        for over in ("", " over processes")
    },
    "sharded optimizer": _PROGRAMS_REFUSED_WHEN_SHARDED,
    "sharded optimizer over processes": _PROGRAMS_REFUSED_WHEN_SHARDED,
}


#: Cases that 4 stages can run; the others have fewer layers.
_FOUR_STAGE_CASES = {
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "all-together", "attention",
    "batch-norm-images", "batch-norm-masked", "convolution", "dict-of-inputs", "ftrl", "lamb",
    "lars", "lion", "list-of-inputs", "lstm", "masked-mean-with-sample-weight",
    "masked-pooling", "masked-steps", "masked-sum", "masked-weighted-steps", "multioptimizer",
    "muon", "nadam", "positions", "positions-accumulate", "rmsprop", "rows-that-mix",
    "schedulefreeadamw", "sgd",
}  # fmt: skip


def may_refuse(case: Case, strategy: str, num_replicas: int = 2) -> bool:
    """Returns whether a strategy may refuse a case with an error instead of training it."""
    four_stages = strategy == "pipeline interleaved" or (
        strategy in ("pipeline", "pipeline zb") and num_replicas > 2
    )
    if four_stages and case.name not in _FOUR_STAGE_CASES:
        return True
    return case.may_refuse or case.name in REFUSED.get(strategy, ())


def _keras_fit(case: Case, evaluated: Sequence[Case], model: keras.Model) -> list[Result]:
    """Fits once with plain Keras in the current strategy scope, then evaluates each case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(**feeds.fit_arguments(case))
        return [
            collect(model, history, model.evaluate(**feeds.evaluate_arguments(other)))
            for other in evaluated
        ]


def of_known_length(case: Case) -> Case:
    """Returns the case with data of known length.

    With data of unknown length, Keras counts one step too many per epoch, even on one device.
    """
    return dataclasses.replace(case, feed="dataset") if case.feed == "unknown length" else case


def one_device(case: Case) -> Result:
    """Trains a case with plain Keras on one device."""
    case = of_known_length(case)
    return _keras_fit(case, [case], case.build())[0]


@dataclasses.dataclass(frozen=True)
class References:
    """Results of plain Keras on one device for a case and for variants of its rows.

    Attributes:
        expected: The reference result.
        half_evaluated: Trained on all rows, evaluated on half of every batch.
        permuted: The rows of every batch in another order, which may change results by rounding
            only.
        half_lost: Trained on half of every batch, evaluated on all rows.
    """

    expected: Result
    half_evaluated: Result
    permuted: Result
    half_lost: Result


@functools.cache
def expected(name: str) -> Result:
    """Returns the reference result of a case."""
    return one_device(feeds.laid_out(of_known_length(CASES[name])))


@functools.cache
def references(name: str) -> References:
    """Returns all references of a case. One model, traced once, computes all of them."""
    case = of_known_length(CASES[name])
    half, permuted = (feeds.laid_out(one(case)) for one in (feeds.half_lost, feeds.permuted))
    whole, model = feeds.laid_out(case), case.build()
    begin = _beginning(model, case)
    expected, half_evaluated = _keras_fit(case, [case, half], model)
    begin()
    (in_another_order,) = _keras_fit(permuted, [permuted], model)
    begin()
    (half_lost,) = _keras_fit(half, [whole], model)
    return References(expected, half_evaluated, in_another_order, half_lost)


def _beginning(model: keras.Model, case: Case) -> Callable[[], None]:
    """Creates all variables, and returns a function that resets them to their current values."""
    if not model.built:
        model(case.data.x[:1])

    def build() -> None:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    # As in `fit`: inside a graph that is discarded, so that what `build` itself assigns is lost.
    tf.function(build).get_concrete_function()
    variables = [*model.variables, *model.optimizer.variables]
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]

    def begin() -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    return begin


@functools.cache
def _mirrored(num_replicas: int) -> tf.distribute.Strategy:
    """Returns the only strategy of this process: Keras crashes under a second one."""
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


def keras_mirrored(case: Case, num_replicas: int) -> Result:
    """Trains with plain Keras under MirroredStrategy. Run it in a subprocess: it may hang."""
    with _mirrored(num_replicas).scope():
        model = case.build()
        for layer in model._flatten_layers():
            if case.sync_batch_norm and isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = True  # the option that Keras offers
        return _keras_fit(case, [case], model)[0]


def create_strategy(strategy: str, num_replicas: int, batch_size: int = 4) -> strategies.Strategy:
    """Returns one of `STRATEGIES` for global batches of at least `batch_size` rows."""
    options = OPTIONS.get(strategy, {})
    if strategy == "mirrored NCCL stand-in":
        return NcclStandIn(num_replicas)
    if strategy == "pipeline" and batch_size < 4:  # one row for each micro-batch
        options = {"micro_batches": batch_size}
    devices: int | list[str] = num_replicas
    if strategy.endswith("on servers"):
        devices = list(servers.devices(num_replicas))
    elif strategy.endswith("on servers over processes"):
        # A process knows its own server only, and uses only its own part of the names.
        parts = [["CPU:0", f"rank-{rank}:1/CPU:0"] for rank in range(cluster.size())]
        parts[cluster.rank()] = ["CPU:0", *servers.devices(1)]
        devices = [name for part in parts for name in part]
    created = strategies.create(strategy.partition(" ")[0], devices, **options)
    if strategy.startswith("sharded"):
        created.exchange.bucket_bytes = 100  # Some buckets have one weight, others several.
    return created


def tfdist(case: Case, strategy: str, num_replicas: int) -> Result:
    """Trains a case with tfdist's trainer.

    Raises:
        tfdist.errors.TfdistError: If tfdist refuses the case.
    """
    from tfdist import Trainer

    trainer = Trainer(
        case.build,
        strategy=create_strategy(strategy, num_replicas),
        accumulate=case.accumulate,
        sync_batch_norm=case.sync_batch_norm,
    )
    return by_trainer(case, trainer)


def by_trainer(case: Case, trainer: Any) -> Result:
    """Trains and evaluates a case with a Trainer, and returns the results."""
    history = trainer.fit(**feeds.fit_arguments(case))
    for name in ("loss_scale", "skipped_steps"):  # metrics that Keras does not log
        history.history.pop(name, None)
    evaluation = trainer.evaluate(**feeds.evaluate_arguments(case))
    return collect(trainer.model, history, evaluation)
