"""The state of a training at one instant, and its way to and from files.

What is structured is JSON; every array in it is taken out, and lies with the variables in a
TensorFlow checkpoint (`SaveV2`), which `tf.train.load_checkpoint` reads.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.checkpoint.manifest import DamagedError

#: Names of the files.
VARIABLES, STATE = "variables", "state.json"

_ARRAY = "array:"  # what stands in JSON in the place of an array, before its name


class Packed(NamedTuple):
    """A snapshot as it crosses threads, processes and disks: nothing can change it any more.

    Attributes:
        text: JSON.
        arrays: Arrays or tensors on the host, by name.
    """

    text: str
    arrays: dict[str, Any]

    def write(self, folder: str) -> list[str]:
        """Writes the files and returns their names; the same state makes the same bytes."""
        names = sorted(self.arrays)
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=posixpath.join(folder, VARIABLES),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=[tf.convert_to_tensor(self.arrays[name]) for name in names],
            )
        with tf.io.gfile.GFile(posixpath.join(folder, STATE), "w") as file:
            file.write(self.text + "\n")
        return sorted(tf.io.gfile.listdir(folder))

    @classmethod
    def read(cls, folder: str) -> Packed:
        """Reads the files of a checkpoint.

        Raises:
            DamagedError: They cannot be read.
        """
        try:
            with tf.io.gfile.GFile(posixpath.join(folder, STATE), "r") as file:
                text = file.read()
            prefix = posixpath.join(folder, VARIABLES)
            dtypes = tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()
            with tf.device("CPU:0"):
                tensors = tf.raw_ops.RestoreV2(
                    prefix=prefix,
                    tensor_names=list(dtypes),
                    shape_and_slices=[""] * len(dtypes),
                    dtypes=list(dtypes.values()),
                )
            arrays = (t if t.dtype == tf.variant else np.asarray(t.numpy()) for t in tensors)
            return cls(text, dict(zip(dtypes, arrays, strict=True)))
        except (ValueError, tf.errors.OpError, RuntimeError) as error:
            raise DamagedError(f"{folder} cannot be read ({str(error).splitlines()[0]})") from error


@dataclass
class Snapshot:
    """What a checkpoint holds.

    Attributes:
        variables: Arrays, or tensors on the host, by name.
        paths: What Keras calls the variables.
        state: Everything else; nested dicts and lists of JSON's values, and of arrays.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def packed(self) -> Packed:
        """Returns it as it is now.

        Raises:
            TypeError: Something in it is neither JSON's nor an array.
        """
        arrays: dict[str, Any] = dict(self.variables)
        state = _without_arrays(self.state, arrays, "state")
        return Packed(json.dumps({"paths": self.paths, "state": state}, indent=1), arrays)

    @classmethod
    def unpacked(cls, packed: Packed) -> Snapshot:
        """Returns what was packed."""
        told = json.loads(packed.text)
        variables = {name: packed.arrays[name] for name in told["paths"]}
        return cls(variables, told["paths"], _with_arrays(told["state"], packed.arrays))


def _without_arrays(value: Any, arrays: dict[str, Any], name: str) -> Any:
    """A structure for JSON; its arrays are put among others, by the way to their place."""
    if isinstance(value, Mapping):
        return {str(k): _without_arrays(v, arrays, f"{name}/{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(v, arrays, f"{name}/{i}") for i, v in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tf.Tensor):
        arrays[name] = value
        return _ARRAY + name
    if isinstance(value, np.ndarray):
        arrays[name] = value.copy()  # its owner may go on with it
        return _ARRAY + name
    return value


def _with_arrays(value: Any, arrays: Mapping[str, Any]) -> Any:
    """A structure of JSON with its arrays in their places."""
    if isinstance(value, dict):
        return {k: _with_arrays(v, arrays) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_arrays(v, arrays) for v in value]
    if isinstance(value, str) and value.startswith(_ARRAY):
        return arrays.get(value.removeprefix(_ARRAY))  # not all arrays go to all workers
    return value
