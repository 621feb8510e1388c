"""Creates logical CPU devices when a script that names their number first uses TensorFlow.

TensorFlow can divide the CPU only before it starts, and adapting a layer or building a model starts
it. `import tfdist` in a script with `devices=2` therefore prepares a hook: the first operation
creates two logical CPU devices, so that `Trainer(model, devices=2)` may follow later. With GPUs
there is nothing to do.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from pathlib import Path

_NUMBER = re.compile(r"\bdevices\s*=\s*(\d+)\b")
_MOST = 64
#: Variables of processes that a launcher started: each has a device of its own.
_LAUNCHERS = ("TF_CONFIG", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "SLURM_NTASKS")


def prepare() -> None:
    """Installs the hook if this process runs a script that names a number of devices."""
    number = _named_by_script()
    if number < 2:
        return
    from tfdist import devices
    from tfdist.upstream import tensorflow_runtime as upstream

    upstream.before_start(lambda: devices.configure(number))


def _named_by_script() -> int:
    """Returns the largest number of devices in the text of this program; 0 if there is none."""
    program = Path(sys.argv[0]).absolute()  # "-m" or "-c" without a script
    is_command = Path(__file__).parent in program.parents
    launched = any(os.environ.get(name) for name in _LAUNCHERS)
    if program.suffix != ".py" or is_command or launched or multiprocessing.parent_process():
        return 0
    try:
        text = program.read_text()
    except (OSError, UnicodeDecodeError):
        return 0
    numbers = (int(found) for found in _NUMBER.findall(text))
    return max((number for number in numbers if number <= _MOST), default=0)
