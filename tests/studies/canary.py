"""`make canary`: reports what an upgrade to the next TensorFlow and Keras would break.

Installs the newest pre-releases into a separate environment, looks up each private name that
`tfdist/upstream` uses, compares its location and parameters, and runs the quick tests. Prints one
line for each difference, with the places that depend on it.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import importlib.util
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from tests import private_names
from tests.support import ROOT

#: Pre-release packages, by the release that they replace.
NIGHTLY = {"tensorflow": "tf-nightly", "keras": "keras-nightly", "tensorboard": "tb-nightly"}
_PACKAGES = ("keras", "keras_hub", "tensorflow")

#: Files that are irrelevant for tfdist: tests, other backends, Keras 2.
_OTHERS = re.compile(r"_test\.py$|/keras/src/backend/(jax|torch|numpy|openvino)/|/python/keras/")

#: Where and how a name is defined: `keras/src/layers/layer.py: Layer._call(self, inputs)`.
Definitions = set[str]


def main() -> int:
    """Returns 1 if an upgrade needs a change: a name differs, or a quick test fails."""
    parser = argparse.ArgumentParser("tests.studies.canary", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "canary",
                        help="the environment, created if missing")  # fmt: skip
    parser.add_argument("--names-only", action="store_true", help="run no tests")
    arguments = parser.parse_args()
    python = _environment(arguments.folder)
    changes = compare(uses(), installed(), _site_packages(python))
    print("\n".join(changes) or "private names: no differences")
    failed = 0 if arguments.names_only else _quick_tests(python)
    return 1 if changes or failed else 0


def _environment(folder: Path) -> Path:
    """Returns the Python of an environment with the newest pre-releases and the other packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "--pre", *NIGHTLY.values()], check=True)
    subprocess.run([*pip, *_requirements()], check=True)
    versions = [str(python), "-m", "pip", "--disable-pip-version-check", "list"]
    listed = subprocess.run(versions, check=True, capture_output=True, text=True).stdout
    print(*(line for line in listed.splitlines() if "nightly" in line), sep="\n")
    return python


def _requirements() -> list[str]:
    """Returns the requirements of the tests except TensorFlow and Keras."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = setup["options"]["install_requires"] + setup["options.extras_require"]["dev"]
    lines = [line for line in needed.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if Requirement(line).name not in NIGHTLY]


def uses() -> dict[str, list[str]]:
    """Returns the private names that `tfdist/upstream` uses, each with the places of use."""
    results: dict[str, list[str]] = {}
    for path in sorted(private_names.ALLOWED.rglob("*.py")):
        for line, _, name in private_names.private(ast.parse(path.read_text())):
            results.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{line}")
    return results


def compare(names: dict[str, list[str]], old: Path, new: Path) -> list[str]:
    """Returns a line for each name that is missing from, or differs in, the new packages."""
    before, after = (definitions(names, packages) for packages in (old, new))
    changes = []
    for name, places in names.items():
        if before[name] and not after[name]:
            what = "is missing"
        elif gone := before[name] - after[name]:
            added = sorted(after[name] - before[name])
            what = "differs: " + "; ".join(f"no {one}" for one in sorted(gone))
            what += "; ".join(["", *(f"now {one}" for one in added)])
        else:
            continue
        changes.append(f"{name} {what}\n    used in {', '.join(places)}")
    return changes


def definitions(names: Iterable[str], packages: Path) -> dict[str, Definitions]:
    """Returns where each name is defined in installed packages; empty if it is undefined.

    Args:
        names: Attributes (`_flatten_layers`), modules, or names in modules (`keras.src.backend`).
        packages: The `site-packages` folder with Keras and TensorFlow.
    """
    results: dict[str, Definitions] = {name: set() for name in names}
    attributes = {name for name in results if "." not in name}
    mentioned = re.compile(rf"\b({'|'.join(map(re.escape, sorted(attributes)))})\b")
    used = set[str]()
    for package in _PACKAGES:
        for path in sorted((packages / package).rglob("*.py")):
            text = path.read_text(errors="replace")
            other = _OTHERS.search(path.as_posix())
            if other or not (named := set(mentioned.findall(text))):
                continue
            used |= named
            for name, definition in _defined(ast.parse(text), named):
                results[name].add(f"{path.relative_to(packages)}: {definition}")
    for name in used:  # used in Python, but defined only in compiled code
        results[name] = results[name] or {"compiled"}
    for name in results.keys() - attributes:
        if (definition := _of_module(name, packages)) is not None:
            results[name].add(definition)
    return results


def _defined(tree: ast.AST, names: set[str], owner: str = "") -> Iterator[tuple[str, str]]:
    """Yields each of the names that a tree defines or assigns, with its parameters."""
    for node in ast.iter_child_nodes(tree):
        inner = owner
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{owner}{node.name}."
            if node.name in names:
                parameters = "" if isinstance(node, ast.ClassDef) else ast.unparse(node.args)
                yield node.name, f"{owner}{node.name}({parameters})"
        stored = isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        if stored and name in names:
            yield name, f"{owner.partition('.')[0]}.{name} ="
        yield from _defined(node, names, inner)


def _of_module(name: str, packages: Path) -> str | None:
    """Returns the definition of a module or of a name in a module, or None."""
    module, _, attribute = name.rpartition(".")
    for place in (name, module):
        path = packages / place.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if place == name and (file.exists() or path.with_suffix(".so").exists()):
            return f"module {name}"
        if not file.exists():
            continue
        tree = ast.parse(file.read_text())
        for _, definition in _defined(tree, {attribute}):
            return f"{module}: {definition}"
        imported = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        if any(
            attribute in (alias.asname or alias.name) for node in imported for alias in node.names
        ):
            return f"{module} imports {attribute}"
    return None


def installed() -> Path:
    """Returns the folder of the packages that this Python imports."""
    result = importlib.util.find_spec("keras")
    assert result is not None
    assert result.origin is not None
    return Path(result.origin).parents[1]


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def _quick_tests(python: Path) -> int:
    command = [str(python), "-m", "pytest", "-n", "auto", "--dist", "loadgroup", "-m", "quick"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, "tests"], cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
