"""Runs a command that mpirun starts, with its rank before each line.

mpirun has a flag for it, but Open MPI puts the name before each piece of a line, and every kind of
MPI writes it in its own way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from tfdist.cluster.environments import mpi
from tfdist.launcher.output import Relay

#: What shells return for a program that is not there.
_NOT_FOUND = 127


def main(command: Sequence[str]) -> int:
    """Returns the command's exit code."""
    me = mpi.read(os.environ)
    relay = Relay(str(me.rank) if me else "", sys.stdout, sys.stderr)
    try:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # Hydra's processes talk to it through a file that it left open
        )
    except OSError as error:
        print(f"error: {command[0]!r} cannot be started ({error.strerror}).", file=sys.stderr)
        return _NOT_FOUND
    with child:
        # An interrupt reaches the command as well: it decides when to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda received, _: child.send_signal(received))
        relay.start(child)
        code = child.wait()
        relay.join(1.0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
