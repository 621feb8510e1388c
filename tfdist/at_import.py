"""What `import tfdist` does to a script: prepares devices or workers before TensorFlow starts.

Building a model initializes TensorFlow. After that it can neither divide the CPU into logical
devices nor join a cluster. Depending on the text of the running script, a hook does so in
TensorFlow's first operation, so that a model that is already built can be passed to `Trainer`:

- in a process that no launcher started, `devices=2` in the script creates two logical CPU devices
  (on hosts with GPUs, nothing);
- in a worker of `tfdist.launch`, a script that leads to strategy `multi_worker` connects the
  workers. Creating a strategy before the first operation removes the hook, because the strategy
  connects them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
from pathlib import Path

_DEVICES = re.compile(r"\bdevices\s*=\s*(\d+)\b")
_MAX_DEVICES = 64
#: The ID of the process with the hook. Child processes inherit the variables of the launcher.
_PROCESS = "TFDIST_SCRIPT_PROCESS"
_STRATEGY = "multi_worker"


def prepare() -> None:
    """Installs the hook if this process runs a script that needs it."""
    from tfdist.errors import ClusterError

    with contextlib.suppress(ClusterError):  # creating a strategy raises the error
        if os.environ.get("TF_CONFIG"):  # a launcher started this process
            _prepare_to_join()
        else:
            _prepare_devices()


def _prepare_devices() -> None:
    """Lets TensorFlow start with the largest number of devices that the script names."""
    from tfdist import cluster

    numbers = map(int, _DEVICES.findall(_text_of_script(".py")))
    most = max((number for number in numbers if number <= _MAX_DEVICES), default=0)
    if most < 2 or cluster.discover().size > 1:  # each of several workers has one device
        return
    from tfdist import devices
    from tfdist.upstream import tensorflow_runtime

    tensorflow_runtime.before_start(lambda: devices.configure(most))


def _prepare_to_join() -> None:
    """Lets TensorFlow start as one of the workers, if the script leads to the strategy."""
    from tfdist import cluster
    from tfdist.cluster.messages import SECRET

    is_worker = os.environ.setdefault(_PROCESS, str(os.getpid())) == str(os.getpid())
    if not (is_worker and os.environ.get(SECRET) and _leads_to_strategy(_text_of_script())):
        return
    started = cluster.current()
    if started.size == 1 or started.ps:
        return
    from tfdist.groups.collective import CollectiveGroup
    from tfdist.upstream import tensorflow_runtime

    tensorflow_runtime.before_start(lambda: CollectiveGroup(_num_logical_cpus()))


def _text_of_script(suffix: str = "") -> str:
    """Returns the text of the user's script that this process runs; empty if it runs none."""
    program = Path(sys.argv[0])  # "-m" while the package of a command is imported
    is_command = Path(__file__).parent in program.parents
    if is_command or multiprocessing.parent_process() or not program.name.endswith(suffix):
        return ""
    try:
        return program.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _leads_to_strategy(text: str) -> bool:
    """Returns whether a script or its arguments lead to the strategy: others must not join."""
    by_default = "Trainer(" in text and "strategy" not in text  # `strategies.create("auto")`
    return bool(text) and (by_default or any(_STRATEGY in t for t in (text, *sys.argv[1:])))


def _num_logical_cpus() -> int | None:
    """Returns the number of logical CPU devices if there are several and no GPUs, else None."""
    import tensorflow as tf

    if tf.config.get_visible_devices("GPU"):
        return None
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    return len(configured) if len(configured) > 1 else None
