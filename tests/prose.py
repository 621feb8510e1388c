"""`python -m tests.prose [FILE ...]`: checks the wording of all texts. Part of `make lint`.

It reports terms that the field has another word for, in pages, docstrings, comments, messages and
the text of notebooks, and sentences on pages that are longer than `LONGEST` words.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

from tests.support import ROOT

#: Words in a sentence of a page. Code, links and tables do not count.
LONGEST = 40

#: Regular expressions of terms that readers stumble over, and what to write.
INSTEAD_OF = {
    r"channel[ _]split(?!`)": "tensor parallelism, tensor_parallel",
    r"join(s|ed|ing)? (it |them |weights )?again": "all-gather",
    r"comput(e|es|ed|ing) (it |them )?again": "recompute, activation checkpointing",
    r"(stand-in|filler) rows?": "padding",
    r"adding up": "sum, reduction",
    r"(is|are|was|were) (asked|told)\b(?! to)": "a verb that says what happens",
    r"found out": "detected",
    r"to the bit\b": "bitwise identical",
    r"(sums|gradients) (that )?cross(es)?": "all-reduce",
    r"who computes": "where computation runs",
    r"(step|loop)s? of (your|their|its|one's|the user's) own": "custom train_step",
    r"looks? (it|the machine|things) over": "checks",
    r"beginning anywhere|begins? anywhere": "resume position",
    r"waite?d? in vain": "timed out waiting",
    r"(training|run|epoch|it|they) (goes|go|went) on\b(?! to )": "continues, resumes",
    r"is heard": "is honored",
    r"is said to be": "is reported as",
    r"times the other": "speed-up over",
    r"ended by (a )?signal": "terminated, killed",
    r"what of a (training|run|model)": "a subject and a verb",
    r"(as|like) the numbers of one device": "same results as on one device",
    r"hands? (it |them )?over": "passes",
    r"cures?\b": "a fix",
    r"of so many\b|(for|in) so long\b": "the number or the time",
    r"gives? (it|the lock) back": "releases",
    r"(?<!there )(is|are) no "
    "(metric|number|flag|command|worker|recipe|checkpoint|report|process)s?\b": "is not a",
    r"sign(s)? of life": "response, report",
    r"held up the others|holds? up the others": "kept the others waiting",
    r"looks? nowhere else": "searches nowhere else",
    r"runs? on the chief alone": "runs only on the chief",
    r"has another form|have another form": "is invalid",
    r"(left|leave) (it|them) out\b": "remove, skip",
    r"belongs to nobody|nobody (knows|waits|measures|calls)\b": "an active verb",
    r"beside (the|its|their) (job|environment|file|gradients)": "in addition to, next to",
}
_PATTERN = re.compile("|".join(rf"(?P<t{n}>\b{p})" for n, p in enumerate(INSTEAD_OF)), re.I)
_FILES = ("*.py", "*.md", "*.ipynb", "*.cfg", "*.toml", "Makefile")
#: Files that name a term because they define it.
_EXEMPT = {"tests/prose.py"}


def main(paths: list[str]) -> int:
    """Prints each finding in the files at `paths`, and returns 1 where there is one."""
    results = [
        f"{path}:{line}: {problem}"
        for path in paths or _paths()
        for line, problem in findings(path, (ROOT / path).read_text())
    ]
    print("\n".join(results) or "prose: the field's terms, and sentences of readable length")
    return 1 if results else 0


def findings(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the description of each problem in the text of a file.

    Example:
        >>> list(findings("page.md", "The weights are joined again."))
        [(1, "'joined again': write all-gather")]
    """
    for line, passage in _passages(path, text):
        for match in _PATTERN.finditer(passage):
            instead = list(INSTEAD_OF.values())[int(match.lastgroup[1:])]  # type: ignore[index]
            place = line + passage[: match.start()].count("\n")
            yield place, f"{' '.join(match[0].split())!r}: write {instead}"
        if path.endswith(".md"):
            for sentence in _sentences(passage):
                if (words := len(sentence.split())) > LONGEST:
                    yield line, f"{words} words in a sentence: {sentence[:60]}..."


def _paths() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *_FILES], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [path for path in listed.stdout.split() if path not in _EXEMPT]


def _passages(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yields each piece of prose of a file with its first line."""
    if path.endswith(".py"):
        yield from _comments(text)
        yield from _strings(text)
    elif path.endswith(".ipynb"):
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "markdown":
                yield 1, "".join(cell["source"])
    elif path.endswith(".md"):
        yield from _blocks(text)
    else:
        yield 1, text


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _strings(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs and list items of a page, without code."""
    code = r"^```.*?^```|^ {4}[^\n]*$"
    text = re.sub(code, lambda found: "\n" * found[0].count("\n"), text, flags=re.S | re.M)
    line = 1
    for block in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s))", text):
        if block.strip():
            yield line, block
        line += block.count("\n")


def _sentences(block: str) -> list[str]:
    if block.lstrip().startswith(("|", "#", "<", "```", "---")):
        return []
    plain = re.sub(r"`[^`]*`", "code", block)
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    return re.split(r"(?<=[.!?:;])\s+", " ".join(plain.split()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
