"""One worker of a group: trains the cases that it is told, together with the others."""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Client

import tfdist


def main(port: int, strategy: str, num_devices: int) -> None:
    """Answers cases until the connection ends.

    Args:
        port: of the process that asks, on this host.
        strategy: tfdist's name of it.
        num_devices: of this process.
    """
    from tests.conformance.group import Answer

    tfdist.strategies.create(strategy, num_devices)  # before anything starts TensorFlow
    from tests.conformance import engines
    from tests.conformance.cases import CASES
    from tfdist.errors import TfdistError

    with Client(("127.0.0.1", port)) as connection:
        connection.send(tfdist.rank())
        while True:
            try:
                case = CASES[connection.recv()]
            except EOFError:
                return
            try:
                answer = Answer(engines.tfdist(case, strategy, num_devices))
            except Exception as error:
                declined = str(error) if isinstance(error, TfdistError) else ""
                answer = Answer(None, traceback.format_exc(), declined)
            connection.send(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
