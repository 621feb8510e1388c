"""What every benchmark leaves: a line on the machine, and all numbers as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfdist.bench import machine
from tfdist.console import files


def conclude(benchmark: str, results: Any, others: float, path: str | None) -> str:
    """Writes everything as JSON, and returns the facts of the machine as a line.

    Args:
        benchmark: Its name.
        results: Plain data.
        others: Fraction of the processor that other processes took meanwhile.
        path: Where to write; None: nowhere.
    """
    facts = machine.facts()
    if path is not None:
        facts["share_of_other_processes"] = others
        text = json.dumps({"benchmark": benchmark, "machine": facts, "results": results}, indent=1)
        with files.replacing(Path(path)) as temporary:
            temporary.write_text(text + "\n")
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['processor']}, {facts['cores']} cores, {len(facts['gpus'])} GPUs; {versions}; "
        f"other processes took {others:.0%} of the processor."
    )
