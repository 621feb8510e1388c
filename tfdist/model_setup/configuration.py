"""Describes how a model is configured, so that workers can compare it.

What legitimately differs between workers is left out: names that Keras numbers within a process,
addresses of objects, and paths and line numbers of code.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import platform
import sys
import types
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import keras
import numpy as np

from tfdist.checkpoint.manifest import versions
from tfdist.upstream import keras_model
from tfdist.upstream.keras_optimizers import optimizers_of

#: From setting to description, such as `optimizer / momentum` to `0.9`.
Description = dict[str, str]

#: Keys of Keras's configurations that depend on what else a process has created.
_IGNORED = frozenset({"name", "shared_object_id", "build_config", "compile_config"})
_PYTHON = "version of Python"
_PACKAGES = ("tfdist", "tensorflow", "keras", "horovod")
#: Types of a tensor's origin in a functional model: the name of an operation, and two numbers.
#: Elsewhere the same text may be a setting: `activation` is one, and `activation_2` is not.
_HISTORY = [str, int, int]
#: Longer lists, such as vocabularies, are described by a digest.
_LONG_LIST = 100


def describe(model: keras.Model, options: Mapping[str, Any]) -> Description:
    """Returns the settings that determine training on a worker."""
    installed = versions()
    if "horovod" in sys.modules:
        installed["horovod"] = metadata.version("horovod")
    description = {f"version of {name}": installed[name] for name in _PACKAGES if name in installed}
    description[_PYTHON] = ".".join(platform.python_version_tuple()[:2])
    description |= {name: str(value) for name, value in options.items()}
    # A functional model also has operations that are no layers, such as the sum in `x + y`.
    names: dict[str, None] = {}
    for layer in keras_model.flatten_layers(model):
        operations = getattr(layer, "operations", ()) if keras_model.is_functional(layer) else ()
        names |= dict.fromkeys(operation.name for operation in (layer, *operations))
    numbers = {name: f"operation {number}" for number, name in enumerate(names)}
    plain = functools.partial(_plain, names=numbers)
    layers = [] if _is_of_library(type(model)) else keras_model.flatten_layers(model)[1:]
    description |= _settings("model", plain([model, *layers]))
    if model.compiled:
        arguments = dict(keras_model.compile_config(model).config)
        arguments.pop("optimizer", None)
        for name, value in arguments.items():
            description |= _settings(name, plain(value))
    for number, optimizer in enumerate(optimizers_of(model)):
        name = f"optimizer {number + 1}" if number else "optimizer"
        description |= _settings(name, plain(optimizer))
    return description


def first_difference(descriptions: list[Description]) -> str | None:
    """Returns a text about the first setting that differs between ranks, or None."""
    first = descriptions[0]
    same_python = all(other[_PYTHON] == first[_PYTHON] for other in descriptions)
    for rank, other in enumerate(descriptions):
        for name in [*first, *(name for name in other if name not in first)]:
            # Versions of Python compile the same code to other instructions.
            is_compared = name != _PYTHON and (same_python or not name.endswith("code"))
            if is_compared and first.get(name) != other.get(name):
                values = (one.get(name, "missing") for one in (first, other))
                return "{} is {} on rank 0 and {} on rank {}".format(name, *values, rank)
    return None


def _settings(name: str, value: Any) -> Description:
    return {" / ".join(path): text for path, text in _leaves(value, (name,))}


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict) and value:
        for key, nested in value.items():
            yield from _leaves(nested, (*path, str(key)))
    elif isinstance(value, list) and value:
        for number, nested in enumerate(value):
            yield from _leaves(nested, (*path, str(number)))
    else:
        yield path, str(value)


def _plain(value: Any, names: Mapping[str, str]) -> Any:
    """Returns a value as nested dicts and lists of texts and numbers.

    Args:
        value: A configuration of Keras, or an argument of `compile`.
        names: The texts that replace names of operations where a name is expected: in the origin
            of a tensor, in a path, and as a key beside other names.
    """
    plain = functools.partial(_plain, names=names)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return _without_numbers(value, names) if "/" in value else value
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":  # serialized with the path of its file
            return "lambda"
        by_name = set(value) <= names.keys() or any("/" in str(key) for key in value)
        return {
            _without_numbers(str(key), names) if by_name else str(key): plain(nested)
            for key, nested in value.items()
            if key not in _IGNORED
        }
    if isinstance(value, (list, tuple)):
        if len(value) > _LONG_LIST:
            return _digest(repr(value).encode())
        plain_values = [plain(nested) for nested in value]
        if list(map(type, value)) == _HISTORY:
            plain_values[0] = _without_numbers(value[0], names)
        return plain_values
    if isinstance(value, (np.ndarray, np.generic)):
        return _digest(np.asarray(value).tobytes())
    if isinstance(value, functools.partial):
        return [plain(value.func), plain(value.args), plain(value.keywords)]
    if isinstance(value, type):
        return {"name": value.__name__, "code": _code_of_class(value)}
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return {"name": value.__name__, "code": _code_of_function(value)}
    described = {"class": plain(type(value))}
    config = getattr(value, "get_config", None)
    if callable(config):
        try:
            return described | {"config": plain(config())}
        except Exception:  # raised by user code that training does not call
            return described
    return described


def _without_numbers(path: str, names: Mapping[str, str]) -> str:
    """Returns a name of an operation, or the path of a variable, as it is in every process."""
    return "/".join(names.get(part, part) for part in path.split("/"))


def _is_of_library(own: type) -> bool:
    """Returns whether a class belongs to a library of which the versions are compared."""
    return own.__module__.partition(".")[0] in ("keras", "tensorflow", "tfdist")


def _code_of_class(own: type) -> str:
    """Returns a digest of the methods that a class outside of Keras and tfdist defines."""
    if _is_of_library(own):
        return "of the library"
    functions = {
        name: inspect.unwrap(member)
        for name, member in vars(own).items()
        if isinstance(member, types.FunctionType)
    }
    codes = [f"{name} {_code(f.__code__)}" for name, f in sorted(functions.items())]
    return _digest("\n".join(codes).encode())


def _code_of_function(function: types.FunctionType, depth: int = 3) -> str:
    """Returns a digest of a function with the functions and numbers in its closure."""
    held = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, types.FunctionType) and depth:
            held.append(_code_of_function(value, depth - 1))
        elif isinstance(value, (bool, int, float)):
            held.append(repr(value))
    return _digest(repr((_code(function.__code__), held)).encode())


def _code(code: types.CodeType) -> str:
    """Returns a digest of code, without its file and line numbers."""
    constants = [
        _code(constant) if isinstance(constant, types.CodeType) else _constant(constant)
        for constant in code.co_consts
    ]
    return _digest(repr((code.co_code, code.co_names, code.co_varnames, constants)).encode())


def _constant(value: Any) -> str:
    """Returns a text of a constant; the order of sets differs between processes."""
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
