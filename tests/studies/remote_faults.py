"""`python -m tests.studies.remote_faults`: kills device servers, and looks how trainings end.

Every try starts two servers and a training on both, and sends SIGKILL or SIGSTOP to one of the
servers at a random moment of a phase; phases and strategies take turns. The training has to end by
itself, with the watchdog's exit code and the server's name. Start it on a quiet machine: it prints
the seconds that this took.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import select
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

# BLAS libraries start threads when they are imported, which a fork would lose.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

import keras
import numpy as np

import tfdist
from tests.studies.faults.forks import Forked, Report
from tfdist.cluster.networks import free_ports
from tfdist.cluster.remote import __main__ as server_command
from tfdist.cluster.remote import connection
from tfdist.cluster.remote.heartbeat import START_SECONDS, wait_for
from tfdist.console import command
from tfdist.errors import PEER_LOST

#: Phases of a training in which a server is lost: the number of marks that are counted at most, and
#: the most seconds from the mark to the signal.
_PHASES = {
    "connecting": (1, 0.5),
    "building": (1, 0.5),
    "first step": (1, 2.0),
    "step": (40, 0.2),
    "evaluation": (3, 0.2),
    "saving": (3, 0.1),
}
_STRATEGIES = ("pipeline", "sharded", "tensor_parallel")
#: Time until a server is lost on a busy machine, and then until the training must have ended.
_START_SECONDS, _END_SECONDS = 300.0, 120.0


class Outcome(NamedTuple):
    """How a training ended.

    Attributes:
        how: The signal, and the mark after which it was sent.
        seconds: Time from the signal to the end; None: it did not end.
        code: Its exit code.
        named: Whether its output names the server.
    """

    how: str
    seconds: float | None
    code: int | None
    named: bool

    @property
    def is_well(self) -> bool:
        """Whether the training ended with the code and the message that it should."""
        return self.seconds is not None and self.code == PEER_LOST and self.named


class _Reports(keras.callbacks.Callback):
    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def on_train_begin(self, logs: object = None) -> None:
        self._report("first step")

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._report("step")

    def on_test_begin(self, logs: object = None) -> None:
        self._report("evaluation")

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self._report("saving")


def build() -> keras.Model:
    """Returns a small model whose first and last layers are on different servers."""
    layers = [keras.layers.Dense(64, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def train(servers: list[str], strategy: str, folder: Path, report: Report) -> None:
    """Trains without end on the devices of servers; runs in a process of its own."""

    def reporting_wait_for(servers: Sequence[str], seconds: float = START_SECONDS) -> None:
        wait_for(servers, seconds)
        report("connecting")

    def reporting_build() -> keras.Model:
        report("building")
        return build()

    def fit() -> None:
        connection.wait_for = reporting_wait_for
        devices = [f"{server}/CPU:0" for server in servers]
        checkpoints = tfdist.Checkpoints(folder)
        trainer = tfdist.Trainer(
            reporting_build, strategy=strategy, devices=devices, checkpoints=checkpoints
        )
        x = np.random.default_rng(0).normal(size=(96, 16)).astype("float32")
        data = (x, x[:, :1])
        trainer.fit(
            *data, batch_size=16, epochs=10**6, validation_data=data, verbose=0,
            callbacks=[_Reports(report)],
        )  # fmt: skip

    faulthandler.register(signal.SIGUSR1)
    _exit(command.run(fit))


def attempt(
    number: int, how: signal.Signals, phases: Sequence[str], rng: random.Random, folder: Path
) -> Outcome:
    """Starts servers and a training, loses a server, and waits for the end of the training."""
    ports = free_ports(2)
    names = [f"localhost:{port}" for port in ports]
    mark = phases[number % len(phases)]
    strategy = _STRATEGIES[number // len(phases) % len(_STRATEGIES)]
    most, longest = _PHASES[mark]
    count, delay, place = rng.randint(1, most), rng.random() * longest, rng.randrange(2)
    log = folder / f"training-{number}.log"

    def serve(port: int) -> Forked:
        return Forked(lambda _: _exit(server_command.main([str(port)])), {}, folder / "servers.log")

    servers = [serve(port) for port in ports]
    wait_for(names, _START_SECONDS)
    training = Forked(
        lambda report: train(names, strategy, folder / f"checkpoints-{number}", report), {}, log
    )
    sent_at, deadline = 0.0, time.monotonic() + _START_SECONDS
    try:
        while not training.ended() and time.monotonic() < deadline:
            ready, _, _ = select.select([training.pipe], [], [], 0.02)
            if ready:
                training.read_marks()
            if not sent_at and training.marks.count(mark) >= count:
                time.sleep(delay)
                servers[place].signal(how)
                sent_at = time.monotonic()
                deadline = sent_at + _END_SECONDS
        seconds = time.monotonic() - sent_at if sent_at and training.code is not None else None
        if seconds is None:
            training.signal(signal.SIGUSR1)  # prints where it hangs
            time.sleep(1)
    finally:
        for child in (training, *servers):
            child.signal(signal.SIGKILL)
            while not child.ended():
                time.sleep(0.01)
    said = log.read_text() if log.exists() else ""
    return Outcome(
        f"{how.name} {delay:.2f} s after {mark} {count}, {strategy}",
        seconds,
        training.code,
        f"error: Device server {names[place]}" in said,
    )


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    """Prints each try and a summary; returns 1 if a training did not end as it should."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.studies.remote_faults", description=__doc__
    )
    parser.add_argument("--kills", type=int, default=36)
    parser.add_argument("--stops", type=int, default=12)
    parser.add_argument("--phase", nargs="+", choices=_PHASES, default=[*_PHASES])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, outcomes = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as folder:
        kinds = [signal.SIGKILL] * arguments.kills + [signal.SIGSTOP] * arguments.stops
        for number, how in enumerate(kinds):
            outcomes.append(attempt(number, how, arguments.phase, rng, Path(folder)))
            print(number, *outcomes[-1], sep="\t", flush=True)
            if not outcomes[-1].is_well:
                print((Path(folder) / f"training-{number}.log").read_text()[-3000:], flush=True)
    for name in ("SIGKILL", "SIGSTOP"):
        own = [one for one in outcomes if one.how.startswith(name)]
        well = sum(one.is_well for one in own)
        ended = [one.seconds for one in own if one.seconds is not None]
        print(
            f"{name}: {len(own)} tries, {len(own) - len(ended)} hung, {well} "
            f"ended with code {PEER_LOST} and the server's name; seconds until the end: "
            f"median {statistics.median(ended or [0]):.1f}, longest {max(ended, default=0):.1f}"
        )
    return int(not all(one.is_well for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
