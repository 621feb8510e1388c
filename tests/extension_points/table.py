"""Every public member of Keras's base classes, what Keras's loops do with it, and what tfdist does.

A row has an override that changes numbers, where Keras's `fit`, `evaluate` or `predict` read the
member. `test_extension_points.py` compares each with plain Keras. `python -m
tests.extension_points.table` writes the page `docs/extension_points.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
from keras import ops

PAGE = Path("docs/extension_points.md")

#: The classes of the table, by the part of the test program that is of this class.
BASES: dict[str, type] = {
    "model": keras.Model,
    "layer": keras.layers.Layer,
    "optimizer": keras.optimizers.Optimizer,
    "metric": keras.metrics.Metric,
    "loss": keras.losses.Loss,
    "callback": keras.callbacks.Callback,
    "dataset": keras.utils.PyDataset,
    "initializer": keras.initializers.Initializer,
    "regularizer": keras.regularizers.Regularizer,
    "constraint": keras.constraints.Constraint,
    "schedule": keras.optimizers.schedules.LearningRateSchedule,
    "policy": keras.DTypePolicy,
}

_SPECIAL = {"__call__", "__getitem__", "__len__"}

#: `override(plain, owner, *args, **kwargs)`, where `plain` is the bound method that it overrides.
Override = Callable[..., Any]


class Point(NamedTuple):
    """A row of the table.

    Attributes:
        keras: What Keras's `fit`, `evaluate` and `predict` do with the member.
        override: Overrides it; None: Keras's loops do not use it.
        refused: A part of the error of tfdist; empty: honored.
        changes: Whether the override changes results of plain Keras.
        also: Further members of the class that the test overrides.
        as_attribute: Whether the test also sets the override on the object.
    """

    keras: str
    override: Override | property | None = None
    refused: str = ""
    changes: bool = True
    also: Mapping[str, Any] = {}
    as_attribute: bool = True


def after(change: Callable[[Any], Any]) -> Override:
    """Returns an override that changes the result of the plain method."""
    return lambda plain, owner, *args, **kwargs: change(plain(*args, **kwargs))


def instead(**options: Any) -> Override:
    """Returns an override that passes other keyword arguments to the plain method."""
    return lambda plain, owner, *args, **kwargs: plain(*args, **kwargs | options)


def _same(result: Any) -> Any:
    return result


def _called(what: str) -> Point:
    return Point(what, after(_same), changes=False, as_attribute=False)


def _shrink(plain: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Halves the weights before the plain method runs."""
    model.set_weights([0.5 * weight for weight in model.get_weights()])
    return plain(*args, **kwargs)


def _shrinks_after_each_call(attribute: str) -> Override:
    def make(plain: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        plain(*args, **kwargs)
        function = getattr(model, attribute)

        def wrapper(iterator: Any) -> dict[str, Any]:
            logs = function(iterator)
            for weight in model.trainable_variables:
                weight.assign(0.9 * weight)
            return {**logs, "norm": float(ops.norm(model.layers[-1].kernel))}

        setattr(model, attribute, wrapper)

    return make


def _move_bias(plain: Any, callback: Any, *args: Any, **kwargs: Any) -> None:
    """Changes a weight when a callback is called."""
    plain(*args, **kwargs)
    callback.model.layers[-1].bias.assign_add([0.125])


def _call_that_adds_loss(plain: Any, layer: Any, inputs: Any, **options: Any) -> Any:
    outputs = plain(inputs, **options)
    layer.add_loss(ops.mean(ops.square(outputs)))
    return outputs


def _l2_sp(plain: Any, optimizer: Any, variables: Any) -> None:
    """Starts a slot variable at the weights, which plain Keras's `fit` does not keep."""
    is_built = optimizer.built
    plain(variables)
    if not is_built:
        for slot, weight in zip(optimizer.momentums, variables, strict=True):
            slot.assign(weight)


def _only_step(plain: Any, optimizer: Any, gradient: Any, variable: Any, rate: Any) -> None:
    """Chooses weights by name."""
    plain(gradient, variable, rate * (0.125 if "head" in variable.name else 1.0))


def _halved(plain: Any, optimizer: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
    return plain([gradient / 2 for gradient in gradients], *args, **kwargs)


def _halved_pairs(plain: Any, optimizer: Any, pairs: Any) -> Any:
    return plain([(gradient / 2, variable) for gradient, variable in pairs])


def _doubled_value(plain: Any, optimizer: Any, variable: Any, value: Any) -> None:
    plain(variable, 2 * value)


_OF_CREATION = "Not used; describes, saves or creates objects."
_NOT_READ = "Not used."
_twice = after(lambda result: 2 * result)


def _unused(names: str, why: str = _OF_CREATION) -> dict[str, Point]:
    return {name: Point(why) for name in names.split()}


_LAYER = {
    "__call__": Point("Calls the layer.", _twice, as_attribute=False),
    "add_loss": Point(
        "Called by `call`; adds a loss.", lambda plain, layer, loss: plain(3 * loss),
        also={"call": _call_that_adds_loss},
    ),
    "add_weight": Point(
        "Called by `build`; creates a weight.", instead(initializer="ones"), as_attribute=False
    ),
    "build": Point("Called before the first call; creates weights.", after(_same), changes=False),
    "call": Point("Computes the outputs.", _twice),
    "compute_dtype": Point("The dtype of the computation.", property(lambda _: "float32")),
    "compute_mask": Point("Called with the outputs; its mask reaches the loss.",
        lambda plain, layer, inputs, previous_mask=None: inputs[:, 0] > 0,
        also={"supports_masking": True}, as_attribute=False),
    "compute_output_shape": _called("May be called to build a model."),
    "compute_output_spec": _called("May be called to build a model."),
    "losses": Point("Not used; Keras reads the property of the model."),
    "trainable": Point("Freezes the weights.", property(lambda _: False, lambda *_: None)),
    "variables": Point(
        "Not used.", property(lambda _: []), refused="variables is redefined", changes=False
    ),
    "metrics_variables": Point(
        "Not used.", property(lambda _: []), refused="metrics_variables is redefined",
        changes=False,
    ),
    "supports_masking": Point("Whether masks pass.", property(lambda _: True), changes=False),
    "dtype_policy": _called("The policy; see `DTypePolicy`.")._replace(override=None),
    "rematerialized_call": Point("Used in a `keras.RematScope`, whose work tfdist does itself."),
    "quantized_call": Point("Used for a quantized layer, which does not train."),
    "symbolic_call": _called("Called with symbolic inputs, to build a model."),
    **_unused("dtype input_dtype variable_dtype", "Follows from the policy; see `DTypePolicy`."),
    **_unused("metrics trainable_variables trainable_weights non_trainable_variables "
              "non_trainable_weights weights get_weights set_weights",
              "Not used; Keras reads the lists of the model."),
    **_unused("add_metric add_variable build_from_config count_params from_config "
              "get_build_config get_config input input_spec load_own_variables output path "
              "quantization_mode quantize quantized_build save_own_variables stateless_call"),
}  # fmt: skip

_MODEL = {
    "__call__": Point("Calls the model.", _twice, as_attribute=False),
    "call": Point("Computes the outputs.", _twice),
    "build": Point("Called before the first call; creates weights.", after(_same), changes=False),
    "compile": Point("Called by you, with optimizer, loss and metrics.",
        lambda plain, model, *args, **kwargs: plain(*args, **kwargs | {"loss": "mae"})),
    "compute_loss": Point("Computes the loss of a batch.", _twice),
    "compute_metrics": Point(
        "Updates metrics; what it returns is logged.", after(lambda r: {**r, "x": 2 * r["mae"]})
    ),
    "compute_mask": _called("May be called for masks."),
    "compute_output_shape": _called("May be called to build a model."),
    "compute_output_spec": _called("May be called to build a model."),
    "evaluate": Point(
        "Evaluates, also for `validation_data`.", _shrink, as_attribute=False
    ),
    "fit": Point("Trains.", _shrink, as_attribute=False),
    "predict": Point("Predicts.", _twice, as_attribute=False),
    "get_metrics_result": Point(
        "Returns the logs.", after(lambda r: {**r, "x": 2 * r["loss"]})
    ),
    "reset_metrics": Point("Called before each epoch and evaluation.",
        lambda plain, model: None),
    "metrics": Point("The metrics that are reset and logged.",
        property(lambda model: keras.Model.metrics.fget(model)[:1])),
    "losses": Point("Added losses and penalties, part of the loss.",
        property(lambda model: [ops.sum(ops.square(w)) for w in model.trainable_weights])),
    "make_train_function": Point(
        "Makes the function that is called for each batch. It may wrap the one of Keras.",
        _shrinks_after_each_call("train_function"),
    ),
    "make_test_function": Point("The same for `evaluate`.",
        _shrinks_after_each_call("test_function")),
    "make_predict_function": Point("The same for `predict`.",
        lambda plain, model, *args, **kwargs: plain(*args, **kwargs),
        refused="make_predict_function", changes=False),
    "train_step": Point("Trains on a batch.", after(lambda r: {**r, "x": 2 * r["mae"]})),
    "test_step": Point("Evaluates a batch.", after(lambda r: {**r, "x": 2 * r["mae"]})),
    "predict_step": Point("Computes the outputs for a batch.", _twice),
    "trainable_weights": Point("The weights that are trained.",
        property(lambda model: model.layers[-1].trainable_weights)),
    "trainable_variables": Point("Not used.",
        property(lambda model: model.layers[-1].trainable_variables), changes=False),
    "variables": _LAYER["variables"],
    "metrics_variables": _LAYER["metrics_variables"],
    "add_loss": Point("Not supported by Keras; call that of a layer."),
    "trainable": Point("Freezes the weights.", property(lambda _: True, lambda *_: None),
        changes=False),
    "rematerialized_call": _LAYER["rematerialized_call"],
    "symbolic_call": _called("Called with symbolic inputs, to build a model."),
    "distribute_strategy": _called("TensorFlow's strategy; tfdist has its own.")
        ._replace(override=None),
    "run_eagerly": Point("Whether steps run without a graph; set it in `compile`."),
    "jit_compile": Point("Whether XLA compiles steps; set it in `compile`."),
    **_unused("predict_on_batch test_on_batch train_on_batch",
              "Not used; called by you, and runs on the first device."),
    **_unused("non_trainable_variables non_trainable_weights weights get_weights set_weights "
              "metrics_names compiled_loss compiled_metrics layers loss stateless_call "
              "stateless_compute_loss distribute_reduction_method", _NOT_READ),
    **_unused("compute_dtype dtype dtype_policy input_dtype variable_dtype",
              "Follows from the policy; see `DTypePolicy`."),
    **_unused("add_metric add_variable add_weight build_from_config compile_from_config "
              "count_params export from_config get_build_config get_compile_config get_config "
              "get_layer get_quantization_layer_structure get_state_tree input input_spec "
              "load_own_variables load_weights output path quantization_mode quantize "
              "quantized_build quantized_call save save_own_variables save_weights "
              "set_state_tree summary supports_masking to_json"),
}  # fmt: skip

_OPTIMIZER = {
    "apply_gradients": Point("Called for each batch.", _halved_pairs),
    "apply": Point("Called by `apply_gradients`.", _halved),
    "update_step": Point("Updates one weight.", _only_step),
    "assign": _called("Assigns to a variable."),
    "assign_add": Point("Adds to a variable.", _doubled_value),
    "assign_sub": Point("Subtracts from a variable.", _doubled_value,
        also={"momentum": property(lambda _: 0.0, lambda *_: None)}),
    "build": Point("Creates variables; values that it assigns are lost in Keras's graph.",
        _l2_sp, changes=False),
    "add_optimizer_variables": Point("Called by `build`.", instead(initializer="ones")),
    "add_variable": _called("Called by `build`."),
    "add_variable_from_reference": Point("Called by `build`.", instead(initializer="ones")),
    "learning_rate": Point("The learning rate of an update.",
        property(lambda owner: 0.5 * owner._get_current_learning_rate(), lambda *_: None)),
    "iterations": Point("The number of updates, which some optimizers compute with.",
        property(lambda owner: owner._iterations), changes=False),
    "scale_loss": Point("Scales the loss before gradients are computed.", _twice),
    "finalize_variable_values": Point("Called after the last epoch.",
        lambda plain, optimizer, variables: [v.assign(0.5 * v) for v in variables]),
    "variables": _LAYER["variables"],
    "exclude_from_weight_decay": Point("Called by you, before `build`."),
    **_unused("from_config get_config load_own_variables save_own_variables set_weights"),
    **_unused("stateless_apply", _NOT_READ),
}  # fmt: skip

_METRIC = {
    "update_state": Point("Called for each batch.",
        lambda plain, metric, y, y_pred, sample_weight=None: plain(y, 2 * y_pred, sample_weight)),
    "result": Point("Returns the logged value, or a dictionary of them.",
        after(lambda r: {"double": 2 * r, "triple": 3 * r})),
    "reset_state": Point("Called before each epoch and evaluation.", lambda plain, metric: None),
    "add_weight": Point("Called by the constructor.", instead(initializer="ones"),
        as_attribute=False, changes=False),
    "add_variable": _called("Called by the constructor."),
    "variables": _LAYER["variables"],
    "__call__": Point(_NOT_READ),
    "dtype": _called("The dtype of the state.")._replace(override=None),
    **_unused("stateless_reset_state stateless_result stateless_update_state", _NOT_READ),
    **_unused("from_config get_config"),
}  # fmt: skip

_LOSS = {
    "__call__": Point("Computes the loss of an output.", _twice, as_attribute=False),
    "call": Point("Computes the loss of each row.", _twice),
    "dtype": _called("The dtype of the loss.")._replace(override=None),
    **_unused("from_config get_config"),
}

_HOOKS = (
    "on_batch_begin on_batch_end on_epoch_begin on_epoch_end on_predict_batch_begin "
    "on_predict_batch_end on_predict_begin on_predict_end on_test_batch_begin on_test_batch_end "
    "on_test_begin on_test_end on_train_batch_begin on_train_batch_end on_train_begin on_train_end"
)
_CALLBACK = {
    **{name: Point("Called then; may change the model.", _move_bias) for name in _HOOKS.split()},
    "set_model": Point("Called before the loop.", lambda plain, callback, model: (
        plain(model), _move_bias(lambda: None, callback))),
    "set_params": Point("Called before the loop.", lambda plain, callback, params: plain(
        {**params, "epochs": 7}), changes=False),
    "model": Point("The model, `trainer.model`."),
}  # fmt: skip

_DATASET = {
    "__getitem__": Point("Returns a batch.",
        lambda plain, data, index: tuple(2 * each for each in plain(index)), as_attribute=False),
    "__len__": Point("The number of batches.", after(lambda n: n - 1), as_attribute=False),
    "num_batches": Point("The number of batches.", property(lambda data: len(data) - 1)),
    "on_epoch_begin": Point("Called before each epoch.",
        lambda plain, data: data.y.__imul__(0.5)),
    "on_epoch_end": Point("Called after each epoch.", lambda plain, data: data.y.__imul__(0.5)),
    **{name: Point("How batches are read ahead.", property(lambda _, v=v: v, lambda *_: None),
        changes=False) for name, v in
       {"workers": 2, "use_multiprocessing": False, "max_queue_size": 3}.items()},
}  # fmt: skip

_CONFIG = _unused("from_config get_config")
TABLE: dict[str, dict[str, Point]] = {
    "model": _MODEL,
    "layer": _LAYER,
    "optimizer": _OPTIMIZER,
    "metric": _METRIC,
    "loss": _LOSS,
    "callback": _CALLBACK,
    "dataset": _DATASET,
    "initializer": {
        "__call__": Point("Returns the first value.", _twice, as_attribute=False),
        "clone": _called("May be called by layers that share an initializer."),
        **_CONFIG,
    },
    "regularizer": {
        "__call__": Point("Returns a penalty.", _twice, as_attribute=False),
        **_CONFIG,
    },
    "constraint": {
        "__call__": Point("Changes a weight after an update.", _twice, as_attribute=False),
        **_CONFIG,
    },
    "schedule": {
        "__call__": Point("Returns the learning rate of a step.", _twice, as_attribute=False),
        **_CONFIG,
    },
    "policy": {
        "compute_dtype": Point("The dtype of the computation.", property(lambda _: "float32")),
        "variable_dtype": Point(
            "The dtype of weights.", property(lambda _: "float64"), changes=False
        ),
        "convert_input": Point("Converts inputs of a layer.", _twice, as_attribute=False),
        "name": Point("Names the policy.", property(lambda _: "other"), changes=False),
        "quantization_mode": Point("None, but for a quantized layer, which does not train."),
        **_CONFIG,
    },
}  # fmt: skip


def members(base: type) -> list[str]:
    """Returns the public members of a class that Keras or its base classes define."""
    kinds = [kind for kind in base.__mro__ if kind.__module__.startswith("keras.")]
    names = {name for kind in kinds for name in vars(kind)}
    if base is keras.utils.PyDataset:
        names |= {"__len__"}  # which a subclass has to define
    return sorted(n for n in names if not n.startswith("_") or n in _SPECIAL)


def page() -> str:
    """Returns the page of the documentation."""
    lines = [_HEAD]
    for part, points in TABLE.items():
        name = BASES[part].__name__
        lines += [f"\n## {name}\n", "| member | Keras's loops | tfdist |", "| --- | --- | --- |"]
        lines += [
            f"| `{member}` | {point.keras} | {_verdict(point)} |"
            for member, point in sorted(points.items())
        ]
    return "\n".join(lines) + "\n"


def _verdict(point: Point) -> str:
    if point.refused:
        return "refused"
    if point.override is None:
        return "the same"
    return "honored, also on the object" if _on_object(point) else "honored"


def _on_object(point: Point) -> bool:
    return point.as_attribute and not isinstance(point.override, property)


_HEAD = """# Extension points

What a program may override, assign or return, and what a `Trainer` does with it. "Honored" means
that `fit`, `evaluate` and `predict` give the numbers of plain Keras on one device; "also on the
object" that this holds for a function that is set as an attribute of an object. "Refused" means an
error with the name of the member and the way out. Tests override each of these members and compare.

"The same" members have no such test: Keras's loops do not use them, or only as the row says, and a
`Trainer` runs Keras's own code there.

An override of `make_train_function` or `make_test_function` has to call `super()`, and may then
replace `self.train_function` by a function that calls it once per batch.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
