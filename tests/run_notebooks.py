"""Runs notebooks in full and stores their outputs: `python -m tests.run_notebooks [NAME ...]`.

Names are prefixes such as `03`; without one, all notebooks run. Standard error (TensorFlow's
messages about missing drivers) and execution times are not stored.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.support import ROOT


def run(path: Path) -> None:
    """Runs a notebook, and writes it back."""
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
    """Returns whether to store an output, after removing TensorFlow's messages from it."""
    if output.output_type != "stream":
        return True
    # In interactive sessions such as notebooks, TensorFlow logs to standard output.
    lines = output.text.splitlines(keepends=True)
    output.text = "".join(line for line in lines if not line.startswith("INFO:tensorflow"))
    return output.name == "stdout" and bool(output.text.strip())


def main() -> None:
    """Runs the notebooks named on the command line."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if path.name.startswith(tuple(sys.argv[1:]) or ("",)):
            run(path)


if __name__ == "__main__":
    main()
