"""Who trains a case: plain Keras on one device, plain Keras mirrored, tfdist."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tests.conformance import feeds
from tests.conformance.cases import CASES
from tests.conformance.results import Result, collect
from tests.gpu_paths.nccl_stand_in import NcclStandIn
from tests.support.case import Case
from tfdist import strategies

#: tfdist's strategies of one process: each with the numbers of replicas that train every case.
STRATEGIES = {
    "one_device": [1],
    "mirrored": [2, 3],
    "mirrored traced once": [2, 3],
    "mirrored hierarchical_copy": [2],
    "mirrored NCCL stand-in": [2],
    "central_storage": [2, 3],
    "towers": [2, 3],
    "pipeline": [2, 4],
    "tensor_parallel": [2, 3, 4],
    "sharded optimizer": [2],
    "sharded gradients": [2],
    "sharded parameters": [2, 3, 4],
}

#: Of strategies that are asked with options: they, by what stands above.
OPTIONS: dict[str, dict[str, Any]] = {
    "mirrored traced once": {"one_trace_from": 0},
    "mirrored hierarchical_copy": {"all_reduce": "hierarchical_copy"},
    "tensor_parallel": {"smallest": 1},
    "tensor_parallel over processes": {"smallest": 1},
    "pipeline over processes": {"micro_batches": 2},
    # Each tensor in a bucket of its own: what the cases train would fit into one.
    "horovod in buckets": {"bucket_mb": 1e-6},
    "multi_worker in buckets": {"bucket_mb": 1e-6},
    **{
        f"sharded {what}{over}": {"shard": what, "smallest": 1}
        for what in ("optimizer", "gradients", "parameters")
        for over in ("", " over processes")
    },
}
# The same over TensorFlow's collectives, instead of Horovod.
OPTIONS |= {
    name.replace("over processes", "over TensorFlow"): options | {"process_group": "tensorflow"}
    for name, options in OPTIONS.items()
    if name.endswith("over processes")
}

#: What strategies cannot have by their nature, and refuse by an error that says so: models that
#: call their layers themselves, steps of one's own, and models of fewer layers than stages.
_BY_STAGES = {
    "loss-scale-overflow",
    "metric-in-call",
    "own-step",
    "own-step-of-pairs",
    "own-step-with-noise",
    "subclassed-unbuilt",
    "tied-weights",
}
#: Programs that cannot be cut for the same reasons.
_PROGRAMS_BY_STAGES = {
    "generative-normalising-flow",
    "guides-inputs-as-a-list",
    "guides-subclassed",
    "losses-of-logits-extended",
    "reinforcement-actor-critic",
    "reinforcement-clipped-policy",
    "series-traffic",
    "tables-rare-fraud",
    "tables-recommender",
    "text-generative-transformer",
}
#: Programs in which plain Keras trains what a Trainer keeps in parts; and of a table, of which it
#: would have gradients of rows, that a layer of one's own holds.
_PROGRAMS_IN_PARTS = {"guides-batch-by-hand", "guides-fit-of-the-model"}
_TABLES_IN_PARTS = {"vision-shifted-windows"}
DECLINED = {
    "pipeline": _BY_STAGES | _PROGRAMS_BY_STAGES,
    "pipeline over processes": _BY_STAGES,
    "pipeline over TensorFlow": _BY_STAGES,
    "tensor_parallel": _PROGRAMS_IN_PARTS,
    "sharded parameters": _PROGRAMS_IN_PARTS | _TABLES_IN_PARTS,
}


#: Those that 4 stages answer; other cases have fewer layers.
_OF_FOUR_STAGES = {
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "all-together",
    "attention",
    "batch-norm-images",
    "batch-norm-masked",
    "convolution",
    "dict-of-inputs",
    "ftrl",
    "lamb",
    "lars",
    "lion",
    "list-of-inputs",
    "lstm",
    "masked-mean-with-sample-weight",
    "masked-pooling",
    "masked-steps",
    "masked-sum",
    "masked-weighted-steps",
    "multioptimizer",
    "muon",
    "nadam",
    "positions",
    "positions-accumulate",
    "rmsprop",
    "rows-that-mix",
    "schedulefreeadamw",
    "sgd",
}


def may_refuse(case: Case, strategy: str, num_replicas: int = 2) -> bool:
    """Tells whether a strategy may decline a case by an error instead of answering it."""
    if strategy == "pipeline" and num_replicas > 2 and case.name not in _OF_FOUR_STAGES:
        return True
    return case.may_refuse or case.name in DECLINED.get(strategy, ())


def _keras_fit(case: Case, evaluated: Sequence[Case], model: keras.Model) -> list[Result]:
    """Plain Keras, under whichever strategy's scope this is called in: fit once, then evaluate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(**feeds.fit_arguments(case))
        return [
            collect(model, history, model.evaluate(**feeds.evaluate_arguments(other)))
            for other in evaluated
        ]


def of_known_length(case: Case) -> Case:
    """The case with data of known length.

    On those of unknown length Keras counts a step too many in every epoch, on one device too.
    """
    return dataclasses.replace(case, feed="dataset") if case.feed == "unknown length" else case


def one_device(case: Case) -> Result:
    """Plain Keras on one device."""
    case = of_known_length(case)
    return _keras_fit(case, [case], case.build())[0]


@dataclasses.dataclass(frozen=True)
class References:
    """What plain Keras on one device makes of a case and of changes to its rows.

    Attributes:
        right: the right answer.
        half_evaluated: trained on all rows, evaluated on half of every batch.
        permuted: the rows of every batch in another order: rounding is all that may differ.
        half_lost: trained on half of every batch, evaluated on all rows.
    """

    right: Result
    half_evaluated: Result
    permuted: Result
    half_lost: Result


@functools.cache
def references(name: str) -> References:
    """All of them from one model, which is traced once."""
    case = of_known_length(CASES[name])
    half, permuted = (feeds.laid_out(one(case)) for one in (feeds.half_lost, feeds.permuted))
    whole, model = feeds.laid_out(case), case.build()
    begin = _beginning(model, case)
    right, half_evaluated = _keras_fit(case, [case, half], model)
    begin()
    (in_another_order,) = _keras_fit(permuted, [permuted], model)
    begin()
    (half_lost,) = _keras_fit(half, [whole], model)
    return References(right, half_evaluated, in_another_order, half_lost)


def _beginning(model: keras.Model, case: Case) -> Callable[[], None]:
    """Makes all variables; returns what gives them the values that they have now."""
    if not model.built:
        model(case.data.x[:1])

    def build() -> None:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    # As `fit` does, in a graph that is thrown away: what `build` itself assigns is lost.
    tf.function(build).get_concrete_function()
    variables = [*model.variables, *model.optimizer.variables]
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]

    def begin() -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    return begin


@functools.cache
def _mirrored(num_replicas: int) -> tf.distribute.Strategy:
    """The one strategy of this process: Keras crashes under a second one."""
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


def keras_mirrored(case: Case, num_replicas: int) -> Result:
    """Plain Keras under MirroredStrategy. It may crash or hang: call it in another process."""
    with _mirrored(num_replicas).scope():
        model = case.build()
        for layer in model._flatten_layers():
            if case.sync_batch_norm and isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = True  # Keras's own remedy
        return _keras_fit(case, [case], model)[0]


def created(strategy: str, num_replicas: int, batch_size: int = 4) -> strategies.Strategy:
    """Returns one of `STRATEGIES`, for global batches of so many rows or more."""
    options = OPTIONS.get(strategy, {})
    if strategy == "mirrored NCCL stand-in":
        return NcclStandIn(num_replicas)
    if strategy == "pipeline" and batch_size < 4:  # its micro-batches have a row each
        options = {"micro_batches": batch_size}
    made = strategies.create(strategy.partition(" ")[0], num_replicas, **options)
    if strategy.startswith("sharded") and made.bucket_bytes:
        made.bucket_bytes = 1  # as `OPTIONS` has it for others
    return made


def tfdist(case: Case, strategy: str, num_replicas: int) -> Result:
    """tfdist's trainer.

    Raises:
        tfdist.errors.TfdistError: it declines the case.
    """
    from tfdist import Trainer

    trainer = Trainer(
        case.build,
        strategy=created(strategy, num_replicas),
        accumulate=case.accumulate,
        sync_batch_norm=case.sync_batch_norm,
    )
    return by_trainer(case, trainer)


def by_trainer(case: Case, trainer: Any) -> Result:
    """What a Trainer makes of a case."""
    history = trainer.fit(**feeds.fit_arguments(case))
    for own in ("loss_scale", "skipped_steps"):  # logged besides what Keras logs
        history.history.pop(own, None)
    evaluation = trainer.evaluate(**feeds.evaluate_arguments(case))
    return collect(trainer.model, history, evaluation)
