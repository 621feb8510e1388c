"""One rank: runs the programs that it is told, together with the others."""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Client

import tests  # noqa: F401 - quietens TensorFlow
import tfdist.horovod as hvd


def main(port: int) -> None:
    """Runs programs until the connection ends; what they return is a worker's result."""
    hvd.init()
    from tests.conformance.group import Answer
    from tests.horovod.programs import PROGRAMS

    with Client(("127.0.0.1", port)) as connection:
        connection.send(hvd.rank())
        while True:
            try:
                program = PROGRAMS[connection.recv()]
            except EOFError:
                return
            try:
                answer = Answer(program())
            except Exception:
                answer = Answer(None, traceback.format_exc())
            connection.send(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
