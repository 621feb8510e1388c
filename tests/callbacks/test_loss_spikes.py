"""A loss that leaves the band of its recent values."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tfdist.callbacks.loss_spikes import LossSpikes
from tfdist.errors import ConfigurationError, LossSpikeError


def feed(spikes: LossSpikes, losses: list[float]) -> None:
    """Calls the callback with the mean over the epoch so far, as Keras does."""
    call = SimpleNamespace(result=SimpleNamespace(num_rows=10))
    spikes._stats = SimpleNamespace(last_call=call)
    spikes.on_epoch_begin(0)
    for i, mean in enumerate(np.cumsum(losses) / np.arange(1, len(losses) + 1)):
        spikes.on_train_batch_end(i, {"loss": mean})


NOISE = list(1 + np.random.default_rng(0).normal(scale=0.1, size=200))


def test_names_the_step_of_a_spike() -> None:
    with pytest.raises(LossSpikeError, match=r"steps 101 to 101 is 3, .*--step 101"):
        feed(LossSpikes(None, "stop"), [*NOISE[:100], 3.0, *NOISE[100:]])


def test_a_spike_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    feed(LossSpikes(None, "warn"), [*NOISE[:100], 3.0, 9.0, 27.0, *NOISE[100:]])
    assert capsys.readouterr().err.count("warning: The loss of steps") == 1


@pytest.mark.parametrize("losses", [NOISE, [5.0, *NOISE], list(np.geomspace(9, 0.1, 300))])
def test_no_spike_without_one(losses: list[float]) -> None:
    feed(LossSpikes(None, "stop"), losses)


def test_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected 'warn' or 'stop'"):
        LossSpikes(None, "rollback")  # type: ignore[arg-type]
