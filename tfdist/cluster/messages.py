"""Authenticated messages between the processes of a job, and a tree that relays long ones.

Messages are JSON values, one per line. Both sides send a random number (nonce). Every line contains
an HMAC-SHA256, under the key, of both nonces, its direction, its number and its text. Messages of
processes without the key are rejected, and lines cannot be modified, replayed or reflected. The
texts are not encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tfdist.cluster.record import joined, split
from tfdist.errors import ClusterError

#: The environment variable with the secret of a job, which launchers set for its processes. Without
#: it, the key is empty, which protects only against accidental connections.
SECRET = "TFDIST_JOB_SECRET"

#: Maximum line length in bytes, enough for the addresses of ten thousand workers.
LIMIT = 2**20
#: Maximum line length of a process that has not authenticated itself yet.
FIRST_LIMIT = 2**14

_GREETING = b"tfdist "
_NONCE_BYTES = 16
#: Children of each worker in the tree of relays.
FANOUT = 16
#: Time limit for receiving the message from a parent, and for a child to fetch it.
_RELAY_SECONDS = 30.0


def job_key() -> bytes:
    """Returns the key of this job's messages; empty if no secret is set."""
    return os.environ.get(SECRET, "").encode()


def secret_environ() -> dict[str, str]:
    """Returns the environment variable with the inherited secret, or else with a new one."""
    return {SECRET: os.environ.get(SECRET) or secrets.token_hex(32)}


def printable(text: str, max_length: int = 500) -> str:
    """Returns a text without control characters, truncated to `max_length` characters.

    Escape sequences in texts of other processes could manipulate the terminal.
    """
    if len(text) <= max_length and text.isprintable():
        return text
    visible = "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:max_length])
    return f"{visible}..." if len(text) > max_length else visible


def to_text(message: Any) -> bytes:
    """Serializes a message, without a signature."""
    return json.dumps(message, separators=(",", ":")).encode()


class Session:
    """Signs and verifies the lines of one connection.

    Args:
        key: The secret key of this job.
        peer_nonce: The listening side's nonce; None on the listening side.
    """

    def __init__(self, key: bytes, peer_nonce: bytes | None = None) -> None:
        self._key, self._nonce = key, secrets.token_bytes(_NONCE_BYTES)
        self._listens = peer_nonce is None
        self._sent = self._received = 0
        self._session_key = b""
        if peer_nonce is not None:
            self._session_key = self._derive(peer_nonce, self._nonce)

    @classmethod
    def answering(cls, key: bytes, greeting: bytes) -> Session | None:
        """Returns the connecting side's session, or None if the greeting is invalid."""
        nonce = _unhex(greeting.removeprefix(_GREETING).strip())
        return cls(key, nonce) if greeting.startswith(_GREETING) and nonce else None

    def greeting(self) -> bytes:
        """Returns the first line of the listening side."""
        return _GREETING + self._nonce.hex().encode() + b"\n"

    def sign(self, message: Any) -> bytes:
        """Returns a message as a signed line."""
        return self.sign_text(to_text(message))

    def sign_text(self, text: bytes) -> bytes:
        """Returns the `to_text` of a message as a signed line."""
        line = self._mac(self._listens, self._sent, text) + b" " + text + b"\n"
        self._sent += 1
        if self._sent == 1 and not self._listens:
            line = self._nonce.hex().encode() + b" " + line
        return line

    def verify(self, line: bytes) -> Any:
        """Returns the message of a received line.

        Raises:
            ValueError: The signature is invalid, or the text is not JSON.
        """
        if self._listens and not self._received:
            nonce, _, line = line.partition(b" ")
            self._session_key = self._derive(self._nonce, _unhex(nonce) or b"")
        mac, _, text = line.rstrip(b"\n").partition(b" ")
        expected = self._mac(not self._listens, self._received, text)
        if not hmac.compare_digest(mac, expected):
            raise ValueError("not signed by a process of this job")
        self._received += 1
        return json.loads(text)

    def _derive(self, listener: bytes, connector: bytes) -> bytes:
        return hmac.digest(self._key, listener + connector, "sha256")

    def _mac(self, by_listener: bool, number: int, text: bytes) -> bytes:
        head = b"%d %d " % (by_listener, number)
        return hmac.digest(self._session_key, head + text, "sha256").hex().encode()


def _unhex(text: bytes) -> bytes | None:
    try:
        nonce = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return None
    return nonce if len(nonce) == _NONCE_BYTES else None


async def greet(writer: StreamWriter, key: bytes) -> Session:
    """Starts the protocol on the listening side of a connection."""
    session = Session(key)
    writer.write(session.greeting())
    return session


async def answer(reader: StreamReader, key: bytes) -> Session:
    """Starts the protocol on the connecting side of a connection.

    Raises:
        ConnectionError: The other side is not a tfdist process.
    """
    session = Session.answering(key, await _line(reader))
    if session is None:
        raise ConnectionError("it is not a worker of tfdist")
    return session


async def receive(reader: StreamReader, session: Session) -> Mapping[str, Any] | None:
    """Returns the next message, or None if the connection was closed or the line is invalid.

    Raises:
        OSError: The connection broke.
    """
    try:
        message = session.verify(await _line(reader))
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


async def _line(reader: StreamReader) -> bytes:
    """Returns the next line; empty if it is longer than the reader's limit."""
    try:
        return await reader.readline()
    except ValueError:  # longer than the limit
        return b""


def parent_of(rank: int) -> int:
    """Returns the rank from which a rank other than 0 receives the message."""
    return (rank - 1) // FANOUT


class Relay:
    """A worker's node in the tree. Use it as an asynchronous context manager.

    Rank r receives the message from rank (r - 1) // `FANOUT`, and forwards it to its children. It
    arrives after log(n) / log(`FANOUT`) hops with n workers: four for 4,096 workers.

    Attributes:
        address: `"host:port"` at which children fetch the message; empty without children.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self._rank, self._host = rank, host
        first = FANOUT * rank + 1
        self._unserved = set(range(first, min(first + FANOUT, size)))
        self._message: Mapping[str, Any] | None = None
        self._is_known, self._all_served = asyncio.Event(), asyncio.Event()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> Relay:
        if self._unserved:
            self._server = await asyncio.start_server(
                self._serve, self._host, 0, limit=FIRST_LIMIT, backlog=FANOUT
            )
            port = self._server.sockets[0].getsockname()[1]
            self.address = joined(self._host, port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._server:
            self._server.close()

    async def pass_on(self, message: Mapping[str, Any]) -> None:
        """Sends the message to all children that request it in time."""
        self._message = message
        self._is_known.set()
        if self._unserved:  # a missing child raises an error itself, or is reported by rank 0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_served.wait(), _RELAY_SECONDS)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_RELAY_SECONDS):
                session = await greet(writer, job_key())
                request = await receive(reader, session)
                if request is not None:
                    await self._is_known.wait()
                    writer.write(session.sign(self._message))
                    await reader.read()  # wait until the child has received it
                    self._unserved.discard(request.get("rank", -1))
        writer.close()
        if not self._unserved:
            self._all_served.set()


async def fetch(address: str, rank: int) -> Mapping[str, Any]:
    """Returns the message from this worker's parent.

    Args:
        address: Address of the parent's relay.
        rank: Rank of this worker.

    Raises:
        ClusterError: The parent does not send the message in time, or has ended.
    """
    message = None
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_RELAY_SECONDS):
            reader, writer = await asyncio.open_connection(*split(address), limit=LIMIT)
            try:
                session = await answer(reader, job_key())
                writer.write(session.sign({"rank": rank}))
                message = await receive(reader, session)
            finally:
                writer.close()
    if message is None:
        raise ClusterError(
            f"Rank {rank} did not receive the workers' addresses from rank {parent_of(rank)} at "
            f"{address}. Check whether that process is running, and whether this host can reach it."
        )
    return message
