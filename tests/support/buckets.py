"""Object stores as processes of their own, and a proxy before them that breaks answers.

The S3 server is `moto`. Azure's emulator `azurite` and the S3 server `s3rver`, both from npm, keep
objects on disk, so that they can be killed and started again. No emulator of Google Cloud Storage
has the requests that obstore sends. Instead, `moto` stands in for it: its S3 requests have the
same form, and the proxy translates conditions on generations to conditions on ETags.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import psutil
import pytest

from pipelines import object_store, storage
from tests.support.commands import require_obstore
from tfdist.cluster.networks import free_ports

#: What happens to a request: nothing, a status, a connection that is closed before or in the middle
#: of the answer, or one that stays silent.
Fault = Literal["", "403", "500", "503", "507", "close", "cut", "stall"]
#: Schemes of URLs that tests use.
Cloud = Literal["s3", "az", "gs"]
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "S3RVER",  # the only one that `s3rver` knows
    "AWS_SECRET_ACCESS_KEY": "S3RVER",
    "AWS_REGION": "us-east-1",
    "AZURE_STORAGE_USE_EMULATOR": "true",
}
#: The account of Azure's emulator, which everybody knows.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_SECONDS_TO_START = 60.0


class Server:
    """An object store as a process of its own.

    Args:
        program: `moto`, or a program on the PATH: `azurite-blob` or `s3rver`.
        folder: Where the others than `moto` keep their objects.

    Attributes:
        program: The program.
        address: Its address.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self.program = program
        self._port = port = free_ports(1)[0]
        self.address = f"http://127.0.0.1:{port}"
        self._command = {
            "moto": [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", f"{port}"],
            "azurite-blob": [
                *("azurite-blob", "--silent", "--skipApiVersionCheck", "--location", f"{folder}"),
                *("--blobHost", "127.0.0.1", "--blobPort", f"{port}"),
            ],
            "s3rver": ["s3rver", "-s", "-d", f"{folder}", "-a", "127.0.0.1", "-p", f"{port}"],
        }[program]
        self.start()

    def start(self) -> None:
        """Starts it, also again, and waits until it listens."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + _SECONDS_TO_START
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"did not start: {self._command}")
            time.sleep(0.1)

    def _listens(self) -> bool:
        """Returns whether this process listens at the port, which another one may have taken."""
        with contextlib.suppress(psutil.Error):  # it has ended
            connections = psutil.Process(self._process.pid).net_connections("tcp")
            listening = [one for one in connections if one.status == psutil.CONN_LISTEN]
            return any(one.laddr.port == self._port for one in listening)
        return False

    def kill(self) -> None:
        """Kills it; ends `azurite-blob` by SIGTERM, which loses its containers otherwise."""
        self._process.send_signal(
            signal.SIGTERM if self.program == "azurite-blob" else signal.SIGKILL
        )
        self._process.wait(30)


@contextlib.contextmanager
def running(program: str, folder: Path) -> Iterator[Server]:
    """Runs a server, as `Server` describes it."""
    server = Server(program, folder)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Runs an S3 server and yields its address."""
    with running("moto", Path()) as server:
        yield server.address


@contextlib.contextmanager
def with_bucket(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Runs an S3 server with the bucket `bucket` as the endpoint of this process.

    Args:
        folder: Its subfolder `cache` is the cache folder of this process.
        patch: Sets the environment.
    """
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with running("moto", folder) as server:
        create_bucket(server.address, "bucket")
        for name, value in endpoints(server.address).items():
            patch.setenv(name, value)
        yield server


def require(program: str) -> None:
    """Skips a test if a server is not installed."""
    if shutil.which(program) is None:
        pytest.skip(f"needs {program} on the PATH: npm install {program.partition('-')[0]}")


def require_s3() -> None:
    """Skips a test, or the tests of a file, without the packages of the client or the server."""
    require_obstore()
    pytest.importorskip("moto", reason="needs the S3 server of the extra 'dev'")


def create_bucket(address: str, name: str) -> None:
    """Creates a bucket of S3."""
    request = urllib.request.Request(f"{address}/{name}", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()


def create_container(address: str, name: str) -> None:
    """Creates a container of Azure's emulator. Signs the request: obstore has none for this."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    listed = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{listed}/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    digest = hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)
    signature = base64.b64encode(digest).decode()
    headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": "0"}
    url = f"{address}/{_ACCOUNT}/{name}?restype=container"
    request = urllib.request.Request(url, headers=headers, method="PUT")
    urllib.request.urlopen(request, timeout=30).close()


def endpoints(address: str) -> dict[str, str]:
    """Returns the variables that make a server the endpoint of all clouds."""
    google = f'{{"gcs_base_url": "{address}", "disable_oauth": true, "client_email": "", '
    google += '"private_key": "", "private_key_id": ""}'
    return ENVIRONMENT | {
        "AWS_ENDPOINT_URL": address,
        "AZURITE_BLOB_STORAGE_URL": address,
        "GOOGLE_SERVICE_ACCOUNT_KEY": google,
    }


@contextlib.contextmanager
def through_proxy(
    address: str, patch: pytest.MonkeyPatch, read_timeout: str = "60s"
) -> Iterator[Proxy]:
    """Runs a proxy before a server, and makes it the endpoint of this process.

    Args:
        address: Address of the server.
        patch: Sets the environment.
        read_timeout: Time after which clients repeat a request that has no answer; short only for
            the fault `stall`, because a busy server answers late.
    """
    proxy = Proxy(address)
    for name, value in endpoints(proxy.address).items():
        patch.setenv(name, value)
    patch.setitem(object_store.CLIENT_OPTIONS, "read_timeout", read_timeout)
    patch.setitem(object_store.UPLOAD_OPTIONS, "read_timeout", read_timeout)
    patch.setitem(object_store.CLIENT_OPTIONS, "allow_http", True)
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
        # Clients close connections whose answer they no longer need.
        self._server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
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
        if fault == "close":
            request.close_connection = True
            return
        if fault and fault != "cut":
            request.send_response(int(fault) if fault.isdecimal() else 503)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        connection = http.client.HTTPConnection(self._target, timeout=60)
        try:
            connection.request(request.command, request.path, body, _for_s3(request.headers))
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):  # the server was killed
            request.close_connection = True
            return
        finally:
            connection.close()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                if name.lower() == "content-length" and request.command != "HEAD":
                    value = str(len(data))
                request.send_header(name, value)
        if tag := answer.getheader("ETag"):  # hexadecimal digits in S3
            with contextlib.suppress(ValueError):
                request.send_header("x-goog-generation", str(int(tag.strip('"').split("-")[0], 16)))
        if answer.getheader("Content-Length") is None:
            request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if fault == "cut":
            request.wfile.write(data[: len(data) // 2])
            request.close_connection = True
            return
        request.wfile.write(data)


def _for_s3(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of a request, with those of Google Cloud Storage translated to S3's."""
    translated = {name: value for name, value in headers.items() if value.strip() != "Bearer"}
    if "authorization" not in {name.lower() for name in translated}:
        # Is not checked, but anonymous uploads are refused.
        credential = "Credential=S3RVER/20260101/us-east-1/s3/x"
        translated["Authorization"] = f"AWS4-HMAC-SHA256 {credential}"
    if source := headers.get("x-goog-copy-source"):
        translated["x-amz-copy-source"] = source
    if value := headers.get("x-goog-if-generation-match"):
        name = "If-None-Match" if value == "0" else "If-Match"
        translated[name] = "*" if value == "0" else f'"{int(value):032x}"'
    return translated
