from __future__ import annotations

import os
import signal
import threading

import pytest

from tfdist.loops import interrupts


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_times(number: int, stops_together: bool) -> list[str]:
    """Interrupts a block within a block so often, and returns how far it came."""
    places = []
    with pytest.raises(KeyboardInterrupt), interrupts.held_back(stops_together):  # noqa: PT012
        with interrupts.held_back(stops_together):
            for i in range(number):
                interrupt()
                places.append(f"signal {i}: {interrupts.pending()}")
        places.append("end of the inner block")
    return places


def test_one_worker_stops_at_once() -> None:
    assert interrupted_times(1, stops_together=False) == []


def test_of_several_it_is_noted_and_raised_where_the_outer_block_ends() -> None:
    assert interrupted_times(1, stops_together=True) == ["signal 0: True", "end of the inner block"]
    assert not interrupts.pending()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_signal_raises_at_once() -> None:
    assert interrupted_times(2, stops_together=True) == ["signal 0: True"]


def test_a_handler_of_the_users_own_stays() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        with interrupts.held_back(stops_together=True):
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


def test_other_threads_cannot_hold_back_and_need_not() -> None:
    def work() -> None:
        with interrupts.held_back(stops_together=True):
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
