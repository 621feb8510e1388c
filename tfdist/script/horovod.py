"""Scripts that distribute themselves with Horovod.

Horovod's Keras API does not know Keras 3: its optimizer no longer synchronizes. When a script
imports `horovod.keras` or `horovod.tensorflow.keras`, it gets `tfdist.horovod`, and
`horovod.tensorflow` gets functions that accept variables of Keras 3.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tfdist.script import runner
from tfdist.upstream.patching import calling_package

_KERAS = ("horovod.keras", "horovod.tensorflow.keras")
_NATIVE = "horovod.tensorflow"


class Finder(MetaPathFinder, Loader):
    """Finds the modules of Horovod that a script imports, before Python does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname not in (*_KERAS, _NATIVE) or calling_package() in ("tfdist", "horovod"):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if (active := runner.active()) is not None:
            active.leave("Horovod")
        module = ModuleType(spec.name, f"tfdist's replacement of {spec.name}.")
        sys.meta_path.remove(self)  # Python finds Horovod's own modules
        try:
            own = importlib.import_module("tfdist.horovod")
            if spec.name == _NATIVE:
                _native(module, importlib.import_module(_NATIVE), own)
            else:
                _forward(module, own)
                sys.modules[f"{spec.name}.callbacks"] = own.callbacks
        finally:
            sys.meta_path.insert(0, self)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module is complete."""


def _forward(module: ModuleType, source: ModuleType) -> None:
    """Gives a module all attributes of another one."""
    vars(module).update({k: v for k, v in vars(source).items() if not k.startswith("__")})
    vars(module)["__getattr__"] = lambda name: getattr(source, name)


def _native(module: ModuleType, real: ModuleType, own: ModuleType) -> None:
    """Fills the module in the place of `horovod.tensorflow`."""
    _forward(module, real)

    def optimizer(optimizer: Any, *args: Any, **options: Any) -> Any:
        import keras

        is_keras = isinstance(optimizer, keras.optimizers.Optimizer)
        make = own.DistributedOptimizer if is_keras else real.DistributedOptimizer
        return make(optimizer, *args, **options)

    def tape(*args: Any, **options: Any) -> Any:
        return _with_plain_sources(real.DistributedGradientTape(*args, **options))

    names = ("broadcast_variables", "broadcast_global_variables", "init")
    replaced = {name: getattr(own, name) for name in names}
    replaced |= {"DistributedOptimizer": optimizer, "DistributedGradientTape": tape}
    vars(module).update(replaced)


def _with_plain_sources(tape: Any) -> Any:
    import keras

    gradient = tape.gradient

    def of_plain(target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        plain = keras.tree.map_structure(
            lambda v: v.value if isinstance(v, keras.Variable) else v, sources
        )
        return gradient(target, plain, *args, **options)

    tape.gradient = of_plain
    return tape
