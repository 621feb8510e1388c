"""Runs notebooks in full and stores their outputs: `python -m tests.run_notebooks [NAME ...]`.

Names are beginnings, `03`; without one, all. What goes to standard error (TensorFlow's notes on
drivers that a machine lacks) is not kept, nor are clock times.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.support import ROOT


def run(path: Path) -> None:
    """Runs one and writes it back."""
    notebook = nbformat.read(path, as_version=4)
    began = time.monotonic()
    NotebookClient(notebook, timeout=600, record_timing=False, resources={
        "metadata": {"path": str(path.parent)}
    }).execute()  # fmt: skip
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if kept(one)]
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)
    print(f"{path.name}: {time.monotonic() - began:.0f} s, {path.stat().st_size // 1000} kB")


def kept(output: nbformat.NotebookNode) -> bool:
    """Whether an output is the notebook's own; takes TensorFlow's notes out of it."""
    if output.output_type != "stream":
        return True
    # Where a person may type, as in a notebook, TensorFlow's notes go to standard output.
    lines = output.text.splitlines(keepends=True)
    output.text = "".join(line for line in lines if not line.startswith("INFO:tensorflow"))
    return output.name == "stdout" and bool(output.text.strip())


def main() -> None:
    """Runs those that are named."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if path.name.startswith(tuple(sys.argv[1:]) or ("",)):
            run(path)


if __name__ == "__main__":
    main()
