"""Early stopping, which names a metric that does not exist."""

from __future__ import annotations

import pytest

from tests.support.training import FIT, build
from tfdist.callbacks.early_stopping import EarlyStopping
from tfdist.errors import ConfigurationError


def test_stops_without_improvement() -> None:
    model = build()
    model.optimizer.learning_rate = 0.0
    history = model.fit(**FIT, epochs=20, callbacks=[EarlyStopping("loss", patience=2)])
    assert len(history.epoch) == 3


def test_missing_metric_raises() -> None:
    callback = EarlyStopping("val_los", patience=2)
    with pytest.raises(ConfigurationError, match=r"expected one of loss, val_loss\. .* val_loss\?"):
        build().fit(**FIT, validation_split=0.5, callbacks=[callback])
