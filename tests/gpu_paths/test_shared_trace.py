"""The shared trace as on hosts with GPUs, where each call is optimized separately."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import engines, results
from tests.conformance.cases import CASES
from tests.gpu_paths.kernel_coverage import gpus_listed
from tfdist.step.shared_trace import SharedTrace
from tfdist.upstream.keras_model import xla_on_demand
from tfdist.upstream.patching import replaced


@pytest.mark.parametrize(
    "name",
    [
        "uneven-batches",
        pytest.param("batch-norm", marks=pytest.mark.long),
        pytest.param("adam", marks=pytest.mark.long),
        pytest.param("embedding", marks=pytest.mark.long),
    ],
)
def test_matches_one_device(name: str) -> None:
    traced, trace = [], SharedTrace._trace

    def keep(self: SharedTrace, arguments: Any) -> Any:
        traced.append(trace(self, arguments))
        return traced[-1]

    with gpus_listed(), replaced(SharedTrace, "_trace", keep), xla_on_demand():
        result = engines.tfdist(CASES[name], "mirrored traced once", 2)
    assert any(one and not one.is_optimized for one in traced)
    assert not results.compare(result, engines.expected(name), CASES[name])
