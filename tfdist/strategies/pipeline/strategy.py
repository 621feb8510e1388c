"""Pipeline: the layers of a model over devices, with micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist import cluster
from tfdist.strategies.pipeline.of_process import PipelineOfProcess
from tfdist.strategies.pipeline.over_processes import PipelineOverProcesses


def Pipeline(  # noqa: N802 - which class it is follows from how the program was started
    devices: int | str | Sequence[str] | None = None,
    stages: int | None = None,
    micro_batches: int = 4,
    order: str = "gpipe",
    cut_at: str | Sequence[str] | None = None,
    balance: str = "parameters",
    balance_rows: int = 8,
    plot_stages: str | None = None,
) -> PipelineOfProcess:
    """Returns a strategy of a model in stages, each on a device of its own.

    Of the processes that a launcher started, each has a pipeline with all stages, and its share of
    each batch.

    Args:
        devices: As `tfdist.devices.resolve` takes them, one a stage; None: all of this process.
        stages: How many; None: as many as devices, or as `cut_at` says.
        micro_batches: Into which a batch, or a process's share of it, is cut.
        order: `"gpipe"` or `"1f1b"`, as in `order`.
        cut_at: Names of the layers behind which to cut, or a text of them with commas between;
            None: where the stages are balanced best.
        balance: What the stages have the same of, as far as can be: `"parameters"`; `"time"` of
            each layer as it is measured on the first device; `"memory"`: weights, what the
            optimizer keeps about them, their gradients, and what is kept of micro-batches.
        balance_rows: Of a micro-batch, for `"memory"`.
        plot_stages: A file to draw the stages and their timeline into; None: none.

    Raises:
        ConfigurationError: Numbers that do not go together.
        DeviceError: A device that does not exist.
        MissingError: Several processes, and Horovod is not installed.
    """
    several = cluster.started_together() is not None
    return (PipelineOverProcesses if several else PipelineOfProcess)(
        devices, stages, micro_batches, order, cut_at, balance, balance_rows, plot_stages
    )
