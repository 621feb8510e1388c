"""An S3 server as a process of its own, and a proxy before it that delays and breaks answers."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest

from pipelines import object_store, storage

#: What happens to a request: nothing, a status, a connection that is closed in the middle of the
#: answer, or one that stays silent.
Fault = Literal["", "403", "500", "503", "507", "cut", "stall"]
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}
_SECONDS_TO_START = 60.0


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Runs a server and yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + _SECONDS_TO_START
        while True:
            try:
                urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the S3 server did not start: {command}") from None
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def create_bucket(address: str, name: str) -> None:
    """Creates a bucket."""
    request = urllib.request.Request(f"{address}/{name}", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()


@contextlib.contextmanager
def through_proxy(address: str, patch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Runs a proxy before a server, and makes it the endpoint of this process."""
    proxy = Proxy(address)
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    patch.setenv("AWS_ENDPOINT_URL", proxy.address)
    patch.setitem(object_store.CLIENT_OPTIONS, "read_timeout", "1s")
    object_store.store_of.cache_clear()
    try:
        yield proxy
    finally:
        proxy.close()
        object_store.store_of.cache_clear()


def remote(url: str) -> storage.RemotePath:
    """Returns the path of a URL."""
    return storage.RemotePath(url)


def upload(folder: Path, url: str) -> None:
    """Copies the files of a local folder to a URL."""
    target = storage.at(url)
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


class Proxy:
    """A proxy before a server, in threads of this process.

    Args:
        address: Address of the server.

    Attributes:
        address: Its own address.
        delay: Seconds before each request is forwarded.
        fault: Chooses the fault of a request by its method and path.
        num_requests: Number of requests so far.
    """

    def __init__(self, address: str) -> None:
        self.delay = 0.0
        self.fault: Callable[[str, str], Fault] = lambda method, path: ""
        self.num_requests = 0
        self._target = address.removeprefix("http://")
        self._ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Ends the proxy."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def forward(self) -> None:
                proxy._forward(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

        return Handler

    def _forward(self, request: BaseHTTPRequestHandler) -> None:
        self.num_requests += 1
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        fault = self.fault(request.command, request.path)
        self._ended.wait(self.delay)
        if fault == "stall":
            self._ended.wait(60)
        if fault and fault != "cut":
            request.send_response(int(fault) if fault.isdecimal() else 503)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        connection = http.client.HTTPConnection(self._target, timeout=60)
        try:
            connection.request(request.command, request.path, body, dict(request.headers))
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                if name.lower() == "content-length" and request.command != "HEAD":
                    value = str(len(data))
                request.send_header(name, value)
        if answer.getheader("Content-Length") is None:
            request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if fault == "cut":
            request.wfile.write(data[: len(data) // 2])
            request.close_connection = True
            return
        request.wfile.write(data)
