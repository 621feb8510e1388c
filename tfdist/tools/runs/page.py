"""The page of a run: one HTML file with all pictures inside, which needs no server."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.console.figures import Curve, panels
from tfdist.console.files import replacing
from tfdist.errors import ConfigurationError
from tfdist.run.records import KINDS, Ledger, read_ledger, read_rows
from tfdist.tools.runs.folders import NOT_METRICS, Run

NAME = "report.html"
#: Values of rows whose curves come last.
_LAST = (
    *NOT_METRICS, "tokens_per_second", "learning_rate", "peak_memory",
    "gpu_utilization", "gpu_memory",
)  # fmt: skip

_HEAD = """<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1"><title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 72rem; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }} h2, summary {{ font: 600 1.2rem system-ui; }}
.curves {{ display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }}
figure {{ margin: 0; }} img {{ width: 100%; height: auto; }} details {{ margin: 1rem 0; }}
table {{ border-collapse: collapse; }} td {{ padding: .15rem .8rem .15rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #8884; overflow-wrap: anywhere; }}
</style><h1>{title}</h1>"""


def write(run: Run) -> Path:
    """Writes the page of a run into its folder, and returns its path.

    Raises:
        ConfigurationError: The folder is in an object store, or cannot be written.
    """
    folder = run.path
    if not isinstance(folder, Path):
        raise ConfigurationError(f"{folder}: copy the run to a local folder first.")
    epochs = f"{len(run.epochs)} of {run.config.get('epochs', '?')} epochs"
    last = ", ".join(f"{name} {value:.4g}" for name, value in run.metrics().items())
    ledger = read_ledger(folder)
    pictures = [path for path in sorted(folder.glob("*.png")) if path.name != "curves.png"]
    versions = folder / "versions.json"
    text = [
        _HEAD.format(title=html.escape(folder.resolve().name)),
        f"<p>{run.started} · {run.state}, {epochs}<br>{html.escape(last)}",
        "<h2>Curves by step</h2><div class=curves>",
        *(_figure(name, png) for name, png in _curves(read_rows(folder))),
        "</div><h2>Where the time went</h2>" + _table(_times(ledger)) if ledger else "</div>",
        "<h2>Checkpoints</h2>" + _table(_checkpoints(folder)),
        "<h2>Pictures</h2><div class=curves>" if pictures else "<div>",
        *(_figure(path.stem, path.read_bytes()) for path in pictures),
        "</div><details><summary>Configuration</summary>" + _table(run.config.items()),
        "</details><details><summary>Environment</summary>",
        _table(json.loads(versions.read_bytes()).items()) if versions.exists() else "",
        "</details>\n",
    ]
    try:
        with replacing(folder / NAME) as path:
            path.write_text("\n".join(text))
    except OSError as error:
        raise ConfigurationError(f"{folder / NAME} cannot be written: {error}") from None
    return folder / NAME


def _curves(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Yields the name and a PNG of each metric, with training by step and validation."""
    steps = [row for row in rows if "epoch" not in row]
    names = dict.fromkeys(name.removeprefix("val_") for row in rows for name in row)
    for name in sorted(names, key=lambda name: (name in _LAST, name != "loss")):
        # Epochs end with means over the epoch, which are no points of the curve by step.
        training = steps if any(name in row for row in steps) else rows
        sources = (name, "training", training), (f"val_{name}", "validation", rows)
        curves = [curve for source in sources if (curve := _curve(*source)).x]
        if name in ("epoch", "step", "seconds") or not curves:
            continue
        file = io.BytesIO()
        panels({name: curves}, "step", size=(5.0, 3.0)).savefig(file, format="png", dpi=110)
        yield name, file.getvalue()


def _curve(key: str, label: str, rows: Sequence[Mapping[str, Any]]) -> Curve:
    points = {row["step"]: row[key] for row in rows if isinstance(row.get(key), (int, float))}
    return Curve(label, sorted(points), [points[step] for step in sorted(points)])


def _figure(name: str, png: bytes) -> str:
    data, name = base64.b64encode(png).decode(), html.escape(name)
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>'


def _times(ledger: Ledger) -> Iterator[tuple[str, str]]:
    for name, seconds in ledger.seconds.items():
        yield KINDS[name], f"{seconds:.1f} s, {seconds / max(ledger.wall, 1e-9):.1%}"
    yield "all", f"{ledger.wall:.1f} s, goodput {ledger.goodput:.1%}"
    yield "steps, failures, checkpoints", f"{ledger.steps}, {ledger.failures}, {ledger.saves}"


def _checkpoints(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("checkpoints/*/manifest.json")):
        facts = json.loads(path.read_bytes())
        logs = ", ".join(f"{name} {value:.4g}" for name, value in facts["logs"].items())
        yield f"step {facts['step']}", f"{facts['written']}: {logs}"


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    cells = (
        f"<tr><td>{html.escape(str(name))}<td>{html.escape(str(value))}"
        for name, value in rows
        if value not in (None, [], {})
    )
    return f"<table>{''.join(cells)}</table>"
