"""All cases of the contract, by name."""

from __future__ import annotations

from tests.conformance import (  # noqa: F401 - importing registers the cases
    cases_added_losses,
    cases_batches,
    cases_feeding,
    cases_fitting,
    cases_layers,
    cases_losses,
    cases_metrics,
    cases_normalization,
    cases_optimizers,
    cases_own_steps,
    cases_random,
    cases_weights,
)
from tests.support.case import CASES

__all__ = ["CASES"]
