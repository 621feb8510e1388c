"""Connections to object stores: stores of obstore, retries of requests, and errors."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, TypeVar

from pipelines.errors import DataError

_Result = TypeVar("_Result")

#: Attempts of a request whose answer ends early, beyond the retries of obstore.
NUM_ATTEMPTS = 4
#: Options of every HTTP client. A stalled connection fails after `read_timeout` and is retried. The
#: whole of an answer may take longer, because many requests share a slow connection.
CLIENT_OPTIONS: dict[str, Any] = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "10m"}
#: Failed requests are repeated until `retry_timeout`. A server may be unreachable for that long.
RETRY: dict[str, Any] = {"max_retries": 8, "retry_timeout": timedelta(minutes=2)}
#: The same for large uploads, whose `read_timeout` includes the time that sending the data takes.
UPLOAD_OPTIONS: dict[str, Any] = {"read_timeout": "3m"}
UPLOAD_RETRY: dict[str, Any] = {"retry_timeout": timedelta(minutes=9)}

#: What a request does, and the permission that it needs, by the first letter of the URL's scheme.
Action = Literal["read", "list", "write", "delete"]
_PERMISSIONS: dict[str, dict[Action, str]] = {
    "s": {
        "read": "s3:GetObject",
        "list": "s3:ListBucket",
        "write": "s3:PutObject",
        "delete": "s3:DeleteObject",
    },
    "g": {
        "read": "storage.objects.get",
        "list": "storage.objects.list",
        "write": "storage.objects.create and storage.objects.delete",
        "delete": "storage.objects.delete",
    },
    "a": {
        "read": "Storage Blob Data Reader",
        "list": "Storage Blob Data Reader",
        "write": "Storage Blob Data Contributor",
        "delete": "Storage Blob Data Contributor",
    },
}


#: What an error says if the bucket does not exist: that of S3, Azure and Google.
_MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
#: Variables with the address of a server for S3; the first one that is set counts.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
#: Where clients get credentials on machines of a cloud, if nothing else has them.
_CREDENTIAL_SERVICES = ("169.254.169.254", "metadata.google.internal")
#: Variables with credentials, by the first letter of the URL's scheme.
_CREDENTIALS = {
    "s": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "g": "GOOGLE_APPLICATION_CREDENTIALS",
    "a": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


class TransferError(DataError):
    """A transfer failed in spite of the retries of obstore."""


class ChangedError(DataError):
    """A conditional write was refused, because the object has another version."""


def library() -> Any:
    """Imports obstore, and returns it."""
    try:
        importlib.import_module("obstore.exceptions")
        return importlib.import_module("obstore")
    except ImportError:
        raise DataError("reading and writing URLs requires obstore: pip install obstore") from None


@functools.cache
def store_of(root: str, for_uploads: bool = False) -> Any:
    """Returns the store of a bucket, one per process. Stores in memory live as long as it does."""
    library()
    stores = importlib.import_module("obstore.store")
    if root.startswith("memory://"):
        return store_of(root) if for_uploads else stores.MemoryStore()
    client, retry, options = dict(CLIENT_OPTIONS), dict(RETRY), {}
    if for_uploads:
        client |= UPLOAD_OPTIONS
        retry |= UPLOAD_RETRY
    if root.startswith(("s3://", "s3a://")):
        options = _profile_credentials()
        given = {name: os.environ[name] for name in _ENDPOINTS if name in os.environ}
        for name, address in given.items():
            if not re.match("https?://.", address):
                raise DataError(
                    f"{name}={address!r}: expected a URL such as http://localhost:9000; set it to "
                    "one, or unset it"
                )
        if endpoint := next(iter(given.values()), None):
            options["endpoint"] = endpoint
            client["allow_http"] = endpoint.startswith("http://")
    with translated(root):
        return stores.from_url(root, client_options=client, retry_config=retry, **options)


def _profile_credentials() -> dict[str, Any]:
    """Returns the credentials of `AWS_PROFILE`, which obstore does not read itself."""
    if not os.environ.get("AWS_PROFILE"):
        return {}
    try:
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider()
    except ImportError:
        raise DataError("AWS_PROFILE requires boto3: pip install boto3") from None
    except Exception as error:  # of botocore, such as for a profile that does not exist
        raise DataError(f"AWS_PROFILE={os.environ['AWS_PROFILE']}: {_summary(error)}") from None
    return {"credential_provider": provider}


def repeated(path: object, request: Callable[[], _Result], action: Action = "read") -> _Result:
    """Returns the result of a request, which is repeated if the transfer breaks off."""
    end = time.monotonic() + float(RETRY["retry_timeout"].total_seconds())
    for attempt in range(NUM_ATTEMPTS - 1):
        try:
            return once(path, request, action)
        except TransferError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1 * 2**attempt)
    return once(path, request, action)


def once(
    path: object,
    request: Callable[[], _Result],
    action: Action = "read",
    timeout: float | None = None,
) -> _Result:
    """Returns the result of a request that is not repeated.

    Args:
        path: The path, for errors.
        request: Performs the request.
        action: What it does.
        timeout: Seconds to wait for it in the main thread.

    Raises:
        TimeoutError: The request takes longer.
    """
    with translated(path, action):
        return _interruptible(request, timeout)


def _interruptible(request: Callable[[], _Result], timeout: float | None) -> _Result:
    """Returns the result of a request. In the main thread, Ctrl-C ends the wait for it.

    obstore does not look for signals while it waits, which can take minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="object store", daemon=True).start()
    return future.result(timeout)


@contextlib.contextmanager
def translated(path: object, action: Action = "read") -> Iterator[None]:
    """Turns errors of obstore into `DataError` of one line, and names the missing permission."""
    errors = library().exceptions
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        if any(text in str(error) for text in _MISSING_BUCKET):
            raise _explained(path, action, error) from None
        raise FileNotFoundError(2, "No such object", str(path)) from None
    except errors.AlreadyExistsError:
        raise FileExistsError(17, "The object exists already", str(path)) from None
    except errors.PreconditionError:
        raise ChangedError(f"{path} was changed by another process") from None
    except errors.BaseError as error:
        raise _explained(path, action, error) from None
    except ValueError as error:  # an invalid name of a bucket or an object
        raise DataError(f"{path}: {_summary(error)}") from None


def _explained(path: object, action: Action, error: Exception) -> DataError:
    """Returns what to raise for an error of obstore, whose type often does not say the cause."""
    errors, cloud = library().exceptions, str(path)[:1]
    text, summary = str(error), _summary(error)
    if any(name in text for name in _MISSING_BUCKET):
        return DataError(f"{path}: there is no such bucket; create it, or check its name")
    if any(address in text for address in _CREDENTIAL_SERVICES):
        variables = _CREDENTIALS.get(cloud, "its environment variables")
        return TransferError(f"{path}: found no credentials; set {variables} ({summary})")
    denied = isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError)
    if denied or re.search("code: 40[13] ", text):
        needed = _PERMISSIONS.get(cloud, {}).get(action, f"to {action} objects")
        return DataError(
            f"{path}: permission denied ({summary}). Set the credentials of the cloud, and grant "
            f"them {needed} for this path."
        )
    if "error sending request" in text:
        return TransferError(f"{path}: no answer; check the connection and endpoint ({summary})")
    return TransferError(f"{path}: {summary}")


def _summary(error: BaseException) -> str:
    """Returns the first line of an error, and the reason that the server gives in XML."""
    text = str(error).strip()
    first = re.sub(r":? *(<[?!a-zA-Z].*)?$", "", text.partition("\n")[0])
    matches = (re.search(rf"<{tag}>(.+?)</{tag}>", text) for tag in ("Code", "Message"))
    return ": ".join([first, *(match[1] for match in matches if match)])
