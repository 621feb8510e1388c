"""The shared trace as on hosts with GPUs, where each call is optimized separately."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import engines, results
from tests.conformance.cases import CASES
from tests.gpu_paths.kernel_coverage import gpus_listed
from tfdist.step.shared_trace import SharedTrace
from tfdist.upstream.keras_model import use_xla_by_default_if
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

    no_xla = use_xla_by_default_if(lambda model: False)
    with gpus_listed(), replaced(SharedTrace, "_trace", keep), no_xla:
        result = engines.tfdist(CASES[name], "mirrored traced once", 2)
    assert any(one and not one.is_optimized for one in traced)
    assert not results.compare(result, engines.expected(name), CASES[name])
