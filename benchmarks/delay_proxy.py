"""A process of its own that forwards connections to a server, and delays each request.

    python -m benchmarks.delay_proxy SERVER_PORT MILLISECONDS...

It prints a line with one port for each delay. Other than the proxy of the tests, it does not share
Python's interpreter lock with the reader, and understands no HTTP: a request is what a client sends
until it waits for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

_CHUNK_BYTES = 1 << 18


@contextlib.contextmanager
def running(address: str, milliseconds: Sequence[float]) -> Iterator[list[str]]:
    """Runs the proxy before a server of this machine.

    Args:
        address: Address of the server, which ends with its port.
        milliseconds: Delays.

    Yields:
        An address for each delay.
    """
    port = address.rpartition(":")[2]
    command = [sys.executable, "-m", __name__, port, *map(str, milliseconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [f"http://127.0.0.1:{one}" for one in process.stdout.readline().split()]
        finally:
            process.terminate()


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float
) -> None:
    """Forwards bytes until one side closes its connection."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            if seconds:
                await asyncio.sleep(seconds)
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(port: int, milliseconds: Sequence[float]) -> None:
    async def listen(seconds: float) -> asyncio.Server:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers, requests = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(
                _forward(reader, requests, seconds), _forward(answers, writer, 0.0)
            )

        return await asyncio.start_server(accept, "127.0.0.1", 0, limit=_CHUNK_BYTES)

    servers = [await listen(delay / 1000) for delay in milliseconds]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), [float(text) for text in sys.argv[2:]]))
