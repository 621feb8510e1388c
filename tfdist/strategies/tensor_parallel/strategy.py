"""Channel split: the layers of a model in parts, each part on a device of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist import cluster
from tfdist.strategies.tensor_parallel.of_process import TensorParallelOfProcess
from tfdist.strategies.tensor_parallel.over_processes import TensorParallelOverProcesses
from tfdist.strategies.tensor_parallel.rules import Rules


def TensorParallel(  # noqa: N802 - which class it is follows from how the program was started
    devices: int | str | Sequence[str] | None = None,
    layout: Rules | None = None,
    smallest: int = 1024,
) -> TensorParallelOfProcess:
    """Returns a strategy of layers split by channels, heads or columns over devices.

    Of the processes that a launcher started, each has all parts, and its share of each batch.

    Args:
        devices: As `tfdist.devices.resolve` takes them; a part of each split layer on each. Of
            several processes: those of this one.
        layout: Which axes of weights to cut, by regular expressions on their paths, as in a
            `keras.distribution.LayoutMap`: `{"dense/kernel": (None, "model")}` splits by column,
            `("model", None)` by row; what none names stays whole. None: each layer that can be
            split is, by column, and by row where it follows a column.
        smallest: Numbers in a kernel below which a layer stays whole, without a layout.

    Raises:
        ConfigurationError: Fewer than two devices, or a rule that is none.
        DeviceError: A device that does not exist.
        MissingError: Several processes, and Horovod is not installed.
    """
    several = cluster.started_together() is not None
    strategy = TensorParallelOverProcesses if several else TensorParallelOfProcess
    return strategy(devices, layout, smallest)
