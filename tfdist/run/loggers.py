"""`--logger`: callbacks of Keras, MLflow and Weights & Biases that record the metrics.

Environment variables of the tracker set the destination: `WANDB_MODE`, `MLFLOW_TRACKING_URI`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tfdist.config import TrainConfig
from tfdist.errors import MissingError

if TYPE_CHECKING:
    from tfdist.run.folder import RunFolder

#: Loggers that need a package; the extra in setup.cfg has the same name.
TRACKERS = ("mlflow", "wandb")


def check(names: Sequence[str]) -> None:
    """Checks before a training that the loggers are installed.

    Raises:
        MissingError: One is not installed.
    """
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise MissingError(f"--logger {name} needs {name}: pip install {name}.")


@contextmanager
def opened(config: TrainConfig, folder: RunFolder, is_chief: bool) -> Iterator[list[Any]]:
    """Yields the callbacks of the loggers, on the chief only; ends their runs after the block."""
    with ExitStack() as ending:
        created = [_MAKE[name](config, folder, ending) for name in config.logger if is_chief]
        for callback in created:
            callback.chief_only = callback.only_reads = True
            callback.every_batch = False  # they log epochs: no step has to wait for them
        yield created


def _tensorboard(config: TrainConfig, folder: RunFolder, ending: ExitStack) -> Any:
    import keras

    return keras.callbacks.TensorBoard(str(folder.tensorboard), write_graph=False)


def _csv(config: TrainConfig, folder: RunFolder, ending: ExitStack) -> Any:
    import keras

    return keras.callbacks.CSVLogger(str(folder.path / "metrics.csv"))


def _mlflow(config: TrainConfig, folder: RunFolder, ending: ExitStack) -> Any:
    import mlflow
    from mlflow.keras.callback import MlflowCallback

    ending.enter_context(mlflow.start_run(run_name=folder.name))
    mlflow.log_params(config.model_dump(mode="json"))
    return MlflowCallback()


def _wandb(config: TrainConfig, folder: RunFolder, ending: ExitStack) -> Any:
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    ending.enter_context(
        wandb.init(name=folder.name, dir=str(folder.path), config=config.model_dump(mode="json"))
    )
    return WandbMetricsLogger()


_MAKE: dict[str, Callable[[TrainConfig, RunFolder, ExitStack], Any]] = {
    "tensorboard": _tensorboard,
    "csv": _csv,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
