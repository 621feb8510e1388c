"""Connects to the other workers when a launched script first uses TensorFlow.

A process can join a TensorFlow cluster only before TensorFlow is initialized, and building a model
initializes it. In scripts that `tfdist.launch` started, `import tfdist` therefore installs a hook
that connects the workers in the first operation. So a model that is already built can be passed to
`Trainer(model)`. Creating a strategy before the first operation removes the hook, because the
strategy connects the workers.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

from tfdist import cluster
from tfdist.cluster.messages import SECRET
from tfdist.errors import ClusterError

#: The ID of the process with the hook. Child processes inherit the variables of the launcher.
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
    """Returns whether this process is a user's script that `tfdist.launch` started."""
    environ = os.environ
    is_worker = environ.setdefault(_PROCESS, str(os.getpid())) == str(os.getpid())
    launched = environ.get(SECRET) and environ.get("TF_CONFIG")
    program = Path(sys.argv[0])  # "-m" while the package of a command is imported
    is_command = Path(__file__).parents[1] in program.parents
    in_main = multiprocessing.parent_process() is None
    if not (is_worker and launched and in_main) or is_command:
        return False
    return _leads_to_strategy(program)


def _leads_to_strategy(program: Path) -> bool:
    """Returns whether a script or its arguments lead to the strategy: others must not join."""
    try:
        text = program.read_text()
    except (OSError, UnicodeDecodeError):
        return False
    by_default = "Trainer(" in text and "strategy" not in text  # `strategies.create("auto")`
    return by_default or any(_STRATEGY in words for words in (text, *sys.argv[1:]))


def _has_peers() -> bool:
    try:
        found = cluster.current()
    except ClusterError:
        return False  # creating a strategy raises the error
    return found.size > 1 and not found.ps


def _num_logical_cpus() -> int | None:
    """Returns the number of logical CPU devices if there are several and no GPUs, else None."""
    import tensorflow as tf

    if tf.config.get_visible_devices("GPU"):
        return None
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    return len(configured) if len(configured) > 1 else None
