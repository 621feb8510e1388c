"""Joins the other workers when a launched script first uses TensorFlow.

A process can join a cluster of TensorFlow only before TensorFlow starts, and building a model
starts it. In a script that `tfdist.launch` started, `import tfdist` therefore prepares a hook: the
first operation joins the workers, so that a model that is already built can be passed to
`Trainer(model, strategy="multi_worker")`. Creating a strategy before the first operation removes
the hook, because the strategy joins them itself.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

from tfdist import cluster
from tfdist.cluster.messages import SECRET
from tfdist.errors import ClusterError

#: The process that has the hook: children inherit the launcher's variables, but not its place.
_PROCESS = "TFDIST_SCRIPT_PROCESS"
_STRATEGY = "multi_worker"


def prepare() -> None:
    """Installs the hook if this process is a worker's script that may need it."""
    if _is_script_of_worker() and _has_peers():
        from tfdist.groups.collective import CollectiveGroup
        from tfdist.upstream import tensorflow_runtime as upstream

        os.environ[_PROCESS] = str(os.getpid())
        upstream.before_start(lambda: CollectiveGroup(_num_logical_cpus()))


def _is_script_of_worker() -> bool:
    """Returns whether this is a program of the user's that `tfdist.launch` started."""
    environ = os.environ
    own = environ.setdefault(_PROCESS, str(os.getpid())) == str(os.getpid())
    launched = environ.get(SECRET) and environ.get("TF_CONFIG")
    program = Path(sys.argv[0])  # "-m" while the package of a command is imported
    is_command = Path(__file__).parents[1] in program.absolute().parents
    in_main = multiprocessing.parent_process() is None
    return bool(own and launched and in_main and not is_command) and _names_strategy(program)


def _names_strategy(program: Path) -> bool:
    """Returns whether a script or its arguments name the strategy: others must not join."""
    try:
        text = program.read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return any(_STRATEGY in words for words in (text, *sys.argv[1:]))


def _has_peers() -> bool:
    try:
        found = cluster.current()
    except ClusterError:
        return False  # whoever creates a strategy gets the error
    return found.size > 1 and not found.ps


def _num_logical_cpus() -> int | None:
    """Returns the number of logical CPU devices if there are several and no GPUs, else None."""
    import tensorflow as tf

    if tf.config.get_visible_devices("GPU"):
        return None
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    return len(configured) if len(configured) > 1 else None
