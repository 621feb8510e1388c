"""The checks of `make test-gpu`, in the order in which they run."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable

from tfdist.cluster import gpus

#: Cases of the contract that a rehearsal trains in place of all.
_REHEARSED_CASES = ("uneven-batches", "batch-norm")
_PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: As in `--only`.
        title: What it checks.
        command: Returns the command, given the host; it exits with 0 if the check passed. Its last
            line is JSON with the text for the table, `{"detail": ...}`, and figures.
        fewest_devices: Devices that it needs.
        needs_horovod: Whether it needs a Horovod, built with NCCL on GPUs.
        full_float32: Whether it compares numbers, for which TF32 is turned off.
        seconds: Time limit, in seconds.
    """

    name: str
    title: str
    command: Callable[[Host], list[str]]
    fewest_devices: int = 1
    needs_horovod: bool = False
    full_float32: bool = True
    seconds: float = 1800.0

    def reason_to_skip(self, host: Host, has_horovod: bool) -> str:
        """Returns why this check cannot run here; empty if it can."""
        if host.num_devices < self.fewest_devices:
            return f"needs {self.fewest_devices} GPUs, {host.num_devices} here"
        if self.needs_horovod and not has_horovod:
            return "needs Horovod with NCCL: HOROVOD_GPU_OPERATIONS=NCCL make horovod"
        return ""


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _worker(name: str, *arguments: str) -> Callable[[Host], list[str]]:
    """Returns the command of a function of `tests.studies.gpu.worker`."""

    def command(host: Host) -> list[str]:
        rehearse = ["--rehearse"] if host.rehearsal else []
        devices = ["--devices", str(host.num_devices)]
        return _python("tests.studies.gpu.worker", name, *devices, *rehearse, *arguments)

    return command


def _conformance(column: str, several: bool) -> Callable[[Host], list[str]]:
    """Returns the command that trains the cases of the contract under a strategy.

    Args:
        column: Of the compatibility table.
        several: Whether the numbers of replicas follow the devices; else it is two processes.
    """

    def command(host: Host) -> list[str]:
        numbers = sorted({2, min(3, host.num_devices), host.num_devices}) if several else [2]
        arguments = ["--strategy", column, "--table", "compatibility", "--jobs", "2"]
        arguments += ["--replicas", *map(str, numbers)]
        if host.rehearsal:
            arguments += [text for case in _REHEARSED_CASES for text in ("--case", case)]
        return _python("tests.conformance", *arguments)

    return command


def _speeds() -> list[Check]:
    checks = [
        Check(
            f"speed-{engine}-{precision}",
            f"ResNet-50, {precision}, {title} on one GPU",
            _worker("speed", "--engine", engine, "--precision", precision),
            full_float32=False,
        )
        for precision in _PRECISIONS
        for engine, title in (("keras", "plain Keras"), ("tfdist", "tfdist"))
    ]
    scaling = [
        Check(
            f"scaling-{number}",
            f"ResNet-50, mixed_float16, mirrored over {number} GPUs",
            _worker("speed", "--engine", "tfdist", "--replicas", str(number)),
            fewest_devices=number,
            full_float32=False,
        )
        for number in (2, 4, 8)
    ]
    return checks + scaling


CHECKS = (
    Check(
        "doctor",
        "doctor finds nothing wrong",
        lambda host: _python("tfdist.tools.doctor", "--no-all-reduce"),
        seconds=600,
    ),
    Check(
        "one-device",
        "contract: one_device",
        _conformance("one_device", several=False),
        seconds=7200,
    ),
    Check(
        "mirrored",
        "contract: mirrored, NCCL",
        _conformance("mirrored", several=True),
        fewest_devices=2,
        seconds=7200,
    ),
    Check(
        "multi-worker",
        "contract: multi_worker, NCCL, 2 processes",
        _conformance("multi_worker", several=False),
        fewest_devices=2,
        seconds=7200,
    ),
    Check(
        "horovod",
        "contract: horovod, NCCL, 2 processes",
        _conformance("horovod", several=False),
        fewest_devices=2,
        needs_horovod=True,
        seconds=7200,
    ),
    Check("precision", "mixed precision trains as plain Keras does", _worker("precision")),
    Check("determinism", "two deterministic runs are bitwise identical", _worker("determinism")),
    Check("memory", "peak memory is what plan memory says", _worker("memory")),
    Check(
        "prefetch",
        "batches are on their GPU before the step",
        _worker("prefetch"),
        fewest_devices=2,
    ),
    *_speeds(),
)


# ---- the host ----


#: Logical CPU devices of a rehearsal.
REHEARSAL_DEVICES = 2


@dataclasses.dataclass(frozen=True)
class Host:
    """The devices of a run of the checks.

    Attributes:
        num_devices: GPUs, or logical CPU devices in a rehearsal.
        rehearsal: Whether CPU devices are used in place of GPUs, with tiny networks.
        visible: `CUDA_VISIBLE_DEVICES` for the checks.
    """

    num_devices: int
    rehearsal: bool
    visible: str

    @classmethod
    def rehearsing(cls, num_devices: int = REHEARSAL_DEVICES) -> Host:
        """Returns a host of logical CPU devices."""
        return cls(num_devices, rehearsal=True, visible="-1")

    @classmethod
    def here(cls) -> Host:
        """Returns the GPUs that this process may use; none without a driver.

        An empty `CUDA_VISIBLE_DEVICES` counts as not set: the tests set it to hide GPUs.
        """
        installed = gpus.installed()
        chosen = gpus.visible(os.environ) if os.environ.get(gpus.VISIBLE) else None
        visible = [str(i) for i in range(len(installed))] if chosen is None else chosen
        number = min(len(visible), len(installed)) if installed else 0
        return cls(number, rehearsal=False, visible=",".join(visible) or "-1")

    def environ(self, full_float32: bool) -> dict[str, str]:
        """Returns the environment of a check.

        Args:
            full_float32: Whether to multiply float32 without TF32, for comparisons of numbers.
        """
        environ = {
            **os.environ,
            gpus.VISIBLE: self.visible,
            # Several processes of a check may share a GPU.
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
            # Kernels that the driver compiles for new GPUs are kept for the next check.
            "CUDA_CACHE_MAXSIZE": os.environ.get("CUDA_CACHE_MAXSIZE", str(4 * 1024**3)),
        }
        if full_float32:
            environ["NVIDIA_TF32_OVERRIDE"] = "0"
        return environ
