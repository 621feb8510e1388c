"""Stands for the strategies of `tf.distribute` that a script creates.

Keras's `fit` under TensorFlow's own strategies crashes or is silently wrong. In a script that
tfdist distributes, the constructors of these strategies return a `Facade` instead: its scope does
nothing, and its number of replicas is that of tfdist's strategy.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ConfigurationError
from tfdist.strategies.base import Strategy
from tfdist.upstream.patching import all_replaced, calling_package, replaced

#: tfdist's strategy for each of TensorFlow's, in one process.
_NAMES = {
    "MirroredStrategy": "mirrored",
    "MultiWorkerMirroredStrategy": "auto",
    "CentralStorageStrategy": "central_storage",
    "OneDeviceStrategy": "one_device",
}
_REFUSED = {
    "TPUStrategy": (
        "tfdist runs on GPUs and CPUs. Start the script with python to train on a TPU, or use "
        "tf.distribute.MirroredStrategy."
    ),
    "ParameterServerStrategy": (
        "it trains asynchronously, without the numbers of one device. Use python -m tfdist.launch "
        "--num-ps 1 with a Trainer and strategy='parameter_server'."
    ),
}
#: Packages that ask TensorFlow for the current strategy, and must get TensorFlow's.
_LIBRARIES = ("keras", "tensorflow", "tfdist", "pipelines")
#: Methods of strategies that only a custom training loop calls.
_LOOP_METHODS = ("run", "reduce", "gather", "experimental_local_results")


class _WorkerData:
    """A function that makes the data of one worker, with batches for all of its replicas."""

    def __init__(self, function: Callable[..., tf.data.Dataset], num_local: int) -> None:
        self._function, self._num_local = function, num_local

    def __call__(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = self._function(context)
        if self._num_local == 1:
            return dataset
        first = tf.nest.flatten(next(iter(dataset)))[0]
        merged, size = dataset.rebatch(self._num_local * int(first.shape[0])), dataset.cardinality()
        if size > 0:  # `rebatch` does not keep it, and `fit` handles unknown sizes differently
            size = -(-size // self._num_local)
        return merged.apply(tf.data.experimental.assert_cardinality(size))


class Facade(tf.distribute.Strategy):
    """Stands for a strategy of TensorFlow that the script created."""

    def __init__(self, runner: Any, strategy: Strategy) -> None:
        self._runner, self._strategy = runner, strategy

    @property
    def num_replicas_in_sync(self) -> int:
        return self._strategy.num_replicas

    @property
    def extended(self) -> Any:
        devices = tuple(f"/device:{name}" for name in self._strategy.devices)
        return SimpleNamespace(worker_devices=devices, parameter_devices=devices)

    @property
    def cluster_resolver(self) -> Any:
        self._runner.script_knows_rank = True
        current = cluster.current()
        workers = {"worker": list(current.addresses)} if current.addresses else {}
        return SimpleNamespace(
            task_type="worker" if current.size > 1 else None,
            task_id=current.rank if current.size > 1 else None,
            cluster_spec=lambda: tf.train.ClusterSpec(workers),
        )

    @contextmanager
    def scope(self) -> Iterator[Facade]:
        """A context in which models are created; they are trained under this strategy."""
        self._runner.strategy_object = self._strategy
        yield self

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns the data set, whose batches are global: `fit` splits them."""
        del options
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Returns data that `fit` reads from a function of each worker."""
        del options
        return _WorkerData(dataset_fn, self._strategy.num_local_replicas)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def run(self, *args: Any, **options: Any) -> NoReturn:
        """Raises an error: a custom loop needs TensorFlow's own strategy."""
        raise ConfigurationError(
            "strategy.run is a custom training loop, which tfdist leaves to TensorFlow, but the "
            "loop is in another file than the script. Start the script with python, or move the "
            "step into train_step of a keras.Model and call fit."
        )

    reduce = gather = experimental_local_results = run


@contextmanager
def replaced_strategies(runner: Any) -> Iterator[None]:
    """Replaces the constructors of `tf.distribute`, and `get_strategy`, within the block."""
    plain = tf.distribute.get_strategy

    def get_strategy() -> tf.distribute.Strategy:
        return plain() if calling_package() in _LIBRARIES else Facade(runner, runner.connect())

    with ExitStack() as stack:
        for module in (tf.distribute, tf.distribute.experimental):
            classes = {
                name: _constructor(runner, name, getattr(module, name))
                for name in (*_NAMES, *_REFUSED)
                if hasattr(module, name)
            }
            stack.enter_context(all_replaced(module, classes))
        stack.enter_context(replaced(tf.distribute, "get_strategy", get_strategy))
        yield


def _constructor(runner: Any, name: str, plain: type) -> type[Facade]:
    """Returns a class in the place of a strategy of TensorFlow, for `isinstance` too."""

    def __new__(cls: type, *args: Any, **options: Any) -> Any:  # noqa: N807
        return plain(*args, **options) if calling_package() in _LIBRARIES else object.__new__(cls)

    def __init__(self: Facade, *args: Any, **options: Any) -> None:  # noqa: N807
        if name in _REFUSED:
            raise ConfigurationError(f"tf.distribute.{name}: {_REFUSED[name]}")
        Facade.__init__(self, runner, _strategy(runner, name, *args, **options))

    return type(name, (Facade,), {"__new__": __new__, "__init__": __init__})


def _strategy(runner: Any, name: str, *args: Any, **options: Any) -> Strategy:
    """Returns tfdist's strategy for the arguments of one of TensorFlow's.

    Over several processes, and if the user has named a strategy or devices, it is the runner's.
    Algorithms and communication options are tfdist's own.
    """
    if cluster.size() > 1 or not runner.chooses_strategy:
        return runner.connect()
    if name == "MultiWorkerMirroredStrategy":  # its arguments describe the workers
        return runner.use(_NAMES[name])
    names = ("devices", "compute_devices", "device")
    devices = next((options[key] for key in names if key in options), args[0] if args else None)
    more = {}
    if name == "CentralStorageStrategy" and (args[1:] or "parameter_device" in options):
        at = args[1] if args[1:] else options["parameter_device"]
        more["parameter_device"] = at.upper().removeprefix("/").removeprefix("DEVICE:")
    return runner.use(_NAMES[name], [devices] if isinstance(devices, str) else devices, **more)


def custom_loop(path: Path) -> str:
    """Returns the first line of a script's custom loop over a strategy; empty if it has none."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return ""  # Python reports the error
    names = {"strategy"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "Strategy" in ast.unparse(node.value):
            names |= {ast.unparse(target) for target in node.targets}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: node.lineno):
        owner, _, method = ast.unparse(call.func).rpartition(".")
        is_strategy = owner in names or owner.lower().endswith("strategy")
        if method == "get_replica_context" or (method in _LOOP_METHODS and is_strategy):
            return f"{path.name}, line {call.lineno}: {ast.unparse(call)[:80]}"
    return ""
