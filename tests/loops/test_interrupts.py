"""Signals are held back while a step runs, and raised at the end of the block."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.support.commands import wait_for
from tests.support.starting import python
from tfdist.errors import REQUEUE, TERMINATED, Preempted
from tfdist.loops import interrupts
from tfdist.loops.data_handler import DataHandler

INTERRUPT, TERMINATE, REQUESTED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def usual_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interrupts, "_has_checkpoint", False)
    yield
    for number in (TERMINATE, REQUESTED, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def stopped_by(*numbers: signal.Signals) -> tuple[type[BaseException], list[str]]:
    """Sends signals inside nested blocks, and returns the raised error and the places reached."""
    places = []
    with pytest.raises(KeyboardInterrupt) as raised, interrupts.deferred():  # noqa: PT012
        with interrupts.deferred():
            for number in numbers:
                os.kill(os.getpid(), number)
                places.append(number.name)
        places.append("end of the inner block")
    return raised.type, places


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ([INTERRUPT], KeyboardInterrupt),
        ([TERMINATE], Preempted),
        ([REQUESTED], Preempted),
        ([REQUESTED, TERMINATE], Preempted),  # before the time limit, and at it
        ([INTERRUPT, TERMINATE], Preempted),
    ],
)
def test_signals_are_raised_at_the_end_of_the_outer_block(
    numbers: list[signal.Signals], error: type[BaseException]
) -> None:
    places = [*(number.name for number in numbers), "end of the inner block"]
    assert stopped_by(*numbers) == (error, places)
    assert not interrupts.pending()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if error is Preempted:
        os.kill(os.getpid(), TERMINATE)  # while the caller saves
    else:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_second_ctrl_c_raises_immediately() -> None:
    assert stopped_by(INTERRUPT, INTERRUPT) == (KeyboardInterrupt, ["SIGINT"])


def test_requests_of_another_worker_are_raised() -> None:
    with pytest.raises(Preempted), interrupts.deferred(lambda pending: max(pending, 3)):
        pass


def test_preemption_outside_of_training_raises_once() -> None:
    with pytest.raises(Preempted), interrupts.preemption_raises():
        os.kill(os.getpid(), TERMINATE)
    with pytest.raises(Preempted), interrupts.preemption_raises():  # noqa: PT012
        try:
            with interrupts.deferred():
                os.kill(os.getpid(), TERMINATE)
        finally:
            os.kill(os.getpid(), TERMINATE)  # while state is being saved
    os.kill(os.getpid(), TERMINATE)  # while the process ends with its exit code


@pytest.mark.parametrize("number", [TERMINATE, REQUESTED, signal.SIGHUP])
def test_exit_code_says_whether_there_is_a_checkpoint(number: signal.Signals) -> None:
    with pytest.raises(Preempted) as raised, interrupts.deferred():
        os.kill(os.getpid(), number)
    assert raised.value.code == TERMINATED
    interrupts.note_checkpoint()
    with pytest.raises(Preempted) as raised, interrupts.deferred():
        os.kill(os.getpid(), number)
    assert raised.value.code == REQUEUE


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
    with interrupts.preemption_raises(), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_preempted_script_exits_with_the_requeue_code() -> None:
    assert REQUEUE == 128 + signal.SIGUSR1
    python("-c", "from tfdist.errors import Preempted; raise Preempted", code=REQUEUE)


def test_iterator_does_not_outlive_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for its threads, which may call Python, while the interpreter ends."""
    iterators = []
    begin_epoch = DataHandler.begin_epoch

    def noting(self: DataHandler, step: int, *more: bool) -> Any:
        iterator = begin_epoch(self, step, *more)
        iterators.append(weakref.ref(iterator))
        return iterator

    monkeypatch.setattr(DataHandler, "begin_epoch", noting)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: os.kill(os.getpid(), INTERRUPT)
    )
    data = tf.data.Dataset.from_tensors((np.ones((2, 1)), np.ones((2, 1)))).repeat(8)
    with pytest.raises(KeyboardInterrupt) as raised:
        tfdist.Trainer(model, strategy="one_device").fit(data, verbose=0, callbacks=[stop])
    wait_for(lambda: iterators[-1]() is None)
    assert raised.tb  # its frames still exist, as when Python prints it


def test_user_handlers_are_kept() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        with interrupts.deferred():
            os.kill(os.getpid(), INTERRUPT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


def test_other_threads_do_not_delay_signals() -> None:
    def work() -> None:
        with interrupts.deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
