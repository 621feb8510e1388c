"""`python -m tests.studies.bucket_faults`: killed writers, and faults of an object store.

A process saves checkpoints to an S3 server all the time, and is killed at random moments. The next
one reads what is there: the newest checkpoint has to be intact, and no older than the last save
that was reported complete.

A table of faults follows: requests that fail, stall or are refused, and servers that are killed.
Under each, checkpoints are saved and a data set is read. Servers that keep their objects when they
are killed, `azurite-blob` and `s3rver`, are used if they are on the PATH (see
`tests.support.buckets`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

# The process must be single-threaded when it forks.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

import pytest

import pipelines
import tfdist.errors
from pipelines import object_store
from tests.studies.faults import saves
from tests.support import buckets, numbers
from tests.support.buckets import Fault
from tfdist.checkpoint.store import Place, store_at

#: Sizes of the arrays of a checkpoint; the last one is uploaded in several parts.
SIZES = (10, 1000, 1_500_000)
#: Returns the fault of a request by its number, from 1, and its method.
Choose = Callable[[int, str], Fault]
#: The request at which a server fails: within the upload of the checkpoint's largest file.
_MIDDLE = 6


def one_in(every: int, fault: Fault) -> Choose:
    """Lets each n-th request fail."""
    return lambda number, method: fault if number % every == 0 else ""


def of_writes(fault: Fault) -> Choose:
    """Lets all writes fail."""
    return lambda number, method: "" if method in ("GET", "HEAD") else fault


def unreachable(seconds: float) -> Choose:
    """Answers nothing for a time that begins with a request in the middle."""
    begin: list[float] = []

    def choose(number: int, method: str) -> Fault:
        if number == _MIDDLE:
            begin.append(time.monotonic())
        return "close" if begin and time.monotonic() - begin[0] < seconds else ""

    return choose


def killed(server: buckets.Server) -> Choose:
    """Kills a server at a request in the middle, and starts it again a second later."""

    def choose(number: int, method: str) -> Fault:
        if number == _MIDDLE:
            server.kill()
            threading.Timer(1, server.start).start()
        return ""

    return choose


#: Makes each fault, separately for saving and for reading.
FAULTS: dict[str, Callable[[], Choose]] = {
    "none": lambda: one_in(5, ""),
    "status 500 for one request in 5": lambda: one_in(5, "500"),
    "status 503 for one request in 5": lambda: one_in(5, "503"),
    "connection closed before one answer in 5": lambda: one_in(5, "close"),
    "connection closed in the middle of one answer in 5": lambda: one_in(5, "cut"),
    "no answer to one request in 30": lambda: one_in(30, "stall"),
    "server unreachable for 3 s": lambda: unreachable(3),
    "out of quota: status 507 for all writes": lambda: of_writes("507"),
    "permission denied: status 403 for all writes": lambda: of_writes("403"),
}


#: Schemes of the URLs by server.
_SERVERS = {"moto": "s3", "s3rver": "s3", "azurite-blob": "az"}


def save_under(url: str, proxy: buckets.Proxy, choose: Choose, num_saves: int) -> str:
    """Saves checkpoints under a fault, and describes the result.

    The last checkpoint has to be intact after the fault has ended, whether it was uploaded in time
    or by `finish`.
    """
    store, failed = store_at(url), 0
    with _fault(proxy, choose):
        for step in range(1, num_saves + 1):
            try:
                store.write(Place(step, 0), saves.packed(step, SIZES), {"step": step})
                store.keep(2, None)
            except OSError:
                failed += 1
    store.finish()
    newest = store.load_newest(print)
    assert newest is not None
    assert saves.step_of(newest[1]) == num_saves
    reported = ", reported; uploaded when the fault ended" if failed else ""
    return f"{failed} of {num_saves}{reported} | intact"


def read_under(url: str, local: Path, proxy: buckets.Proxy, choose: Choose) -> str:
    """Reads a data set under a fault, in the order of local files."""
    options: dict[str, Any] = {"batch_size": 10, "shuffle_buffer": 300, "seed": 2}
    expected = numbers.order(pipelines.read(local, **options))
    dataset = pipelines.read(url, **options)
    with _fault(proxy, choose):
        assert numbers.order(dataset) == expected
    return "each record once, in order"


def give_up(url: str, proxy: buckets.Proxy) -> float:
    """Returns the seconds after which a save to a server that never answers is reported."""
    store, begin = store_at(url), time.monotonic()
    with _fault(proxy, lambda number, method: "close"):
        try:
            store.write(Place(1, 0), saves.packed(1, SIZES), {"step": 1})
        except (OSError, tfdist.errors.ConfigurationError):
            return time.monotonic() - begin
    raise AssertionError("the save succeeded without a server")


@contextlib.contextmanager
def _fault(proxy: buckets.Proxy, choose: Choose) -> Iterator[None]:
    requests = itertools.count(1)
    proxy.fault = lambda method, path: choose(next(requests), method)
    try:
        yield
    finally:
        proxy.fault = lambda method, path: ""


def meet_faults(scheme: str, server: buckets.Server, folder: Path, num_saves: int) -> None:
    """Prints a row for each fault; for servers that keep their objects, for a kill only."""
    program = server.program
    faults = (
        FAULTS
        if program == "moto"
        else {f"{program} killed and started again": lambda: killed(server)}
    )
    create = buckets.create_container if scheme == "az" else buckets.create_bucket
    create(server.address, "bucket")
    with (
        pytest.MonkeyPatch.context() as patch,
        buckets.through_proxy(server.address, patch, read_timeout="1s") as one,
    ):
        patch.setitem(object_store.RETRY, "retry_timeout", timedelta(seconds=20))
        patch.setitem(object_store.UPLOAD_RETRY, "retry_timeout", timedelta(seconds=20))
        buckets.upload(folder, f"{scheme}://bucket/data")
        for number, (name, make) in enumerate(faults.items()):
            saved = save_under(f"{scheme}://bucket/faults-{number}", one, make(), num_saves)
            read = read_under(f"{scheme}://bucket/data", folder, one, make())
            print(f"| {name} | {saved} | {read} |", flush=True)
        if program == "moto":
            seconds = give_up("s3://bucket/gone", one)
            print(f"A server that never answers was given up after {seconds:.0f} s; requests are "
                  "repeated for 20 s here, and for 120 s by default.")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--servers", nargs="+", default=list(_SERVERS), choices=_SERVERS)
    parser.add_argument("--saves", type=int, default=5, metavar="N", help="saves for each fault")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        with buckets.with_bucket(Path(name), patch):
            counts = saves.run(
                given.kills, given.seed, Path(name), "s3://bucket/kills", SIZES, longest_delay=0.3
            )
        print(", ".join(f"{key} {value}" for key, value in counts.items()), flush=True)
        numbers.write(folder := Path(name) / "data", num_records=1000, num_shards=5)
        pipelines.read(folder, 10)  # writes the offsets
        print("| fault | saves that failed | newest checkpoint | reading |", flush=True)
        for program in given.servers:
            if program != "moto" and shutil.which(program) is None:
                print(f"| {program} killed | not tried: it is not on the PATH | | |")
                continue
            with buckets.running(program, Path(name) / program) as server:
                meet_faults(_SERVERS[program], server, folder, given.saves)
    lost = counts["one save old"] + counts["older"]
    return 0 if counts["whole"] == counts["kills"] and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
