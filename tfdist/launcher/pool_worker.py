"""A worker of a `Group`: `worker.py PORT MODULE:FUNCTION ARGUMENT...`."""

from __future__ import annotations

import importlib
import os
import sys
from multiprocessing.connection import Client

from tfdist import cluster


def main(port: str, maker: str, *arguments: str) -> None:
    """Starts the engine and answers questions until nobody asks any more."""
    rank = cluster.discover().rank
    module, function = maker.split(":")
    answer = getattr(importlib.import_module(module), function)(*arguments)
    with Client(("127.0.0.1", int(port))) as connection:
        connection.send((rank, os.getpid()))
        while True:
            try:
                question = connection.recv()
            except EOFError:
                return
            connection.send(answer(*question))


if __name__ == "__main__":
    main(*sys.argv[1:])
