"""Creates logical CPU devices when a script with `devices=N` first uses TensorFlow.

TensorFlow can create logical CPU devices only before it is initialized, and building a model or
adapting a layer initializes it. In a script that contains `devices=2`, `import tfdist` therefore
installs a hook that creates two logical CPU devices in the first operation, so that
`Trainer(model, devices=2)` works later. On hosts with GPUs, the hook does nothing.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from pathlib import Path

_NUMBER = re.compile(r"\bdevices\s*=\s*(\d+)\b")
_MAX_DEVICES = 64


def prepare() -> None:
    """Installs the hook if this process runs a script that contains `devices=N`."""
    number = _named_by_script()
    if number < 2:
        return
    from tfdist import devices
    from tfdist.upstream import tensorflow_runtime as upstream

    upstream.before_start(lambda: devices.configure(number))


def _has_peers() -> bool:
    """Returns whether this is one of several workers, which have one device each."""
    from tfdist.cluster import discover
    from tfdist.errors import ClusterError

    try:
        return discover().size > 1
    except ClusterError:
        return True  # creating a strategy raises the error


def _named_by_script() -> int:
    """Returns the largest N of `devices=N` in the text of this script; 0 if there is none."""
    program = Path(sys.argv[0])  # "-m" or "-c" without a script; commands have an absolute path
    is_command = Path(__file__).parent in program.parents
    if program.suffix != ".py" or is_command or multiprocessing.parent_process() or _has_peers():
        return 0
    try:
        text = program.read_text()
    except (OSError, UnicodeDecodeError):
        return 0
    numbers = (int(found) for found in _NUMBER.findall(text))
    return max((number for number in numbers if number <= _MAX_DEVICES), default=0)
