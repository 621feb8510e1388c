"""The account of a source: what was found, used and left out, and what was done to the rest.

Every source reports the fate of each file, member, row or column to an `Account`, which alone
counts and describes them. The account is printed at the end of a command and stored beside the
index.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from pydantic import BaseModel, Field, ValidationError

from pipelines import storage
from pipelines.errors import DataError
from pipelines.storage import AnyPath

ACCOUNT_NAME = "account.json"
_NUM_EXAMPLES = 3


class Group(BaseModel):
    """Items with the same fate.

    Attributes:
        count: Their number.
        examples: The names of the first ones.
        guessed: Whether the data do not tell that this is right.
    """

    count: int = 0
    examples: list[str] = []
    guessed: bool = False

    def add(self, count: int, examples: Iterable[str], guessed: bool) -> None:
        """Adds items."""
        self.count += count
        self.examples = [*self.examples, *examples][:_NUM_EXAMPLES]
        self.guessed |= guessed

    def __str__(self) -> str:
        shown = ", ".join(self.examples) + (", ..." if self.count > len(self.examples) else "")
        return f"{self.count:,}" + (f" ({shown})" if self.examples else "")


class Fates(BaseModel):
    """What became of all items of one kind, such as files or rows."""

    found: int = 0
    used: int = 0
    clutter: int = 0
    left_out: dict[str, Group] = {}
    changed: dict[str, Group] = {}

    def lines(self, kind: str) -> Iterator[str]:
        """Yields the lines that describe them."""
        num_left_out = sum(group.count for group in self.left_out.values())
        facts = [f"{self.found:,} found", f"{self.used:,} used", f"{num_left_out:,} left out"]
        facts += [f"{self.clutter:,} clutter of the system"] if self.clutter else []
        if unknown := self.found - self.used - num_left_out - self.clutter:
            facts.append(f"{unknown:,} unaccounted for")
        if self.found or self.used:
            yield f"{kind}: {', '.join(facts)}"
        yield from (f"  left out, {reason}: {group}" for reason, group in self.left_out.items())
        for change, group in self.changed.items():
            guess = ", a guess" if group.guessed else ""
            yield f"  {kind} {change}{guess}: {group}"


class Account(BaseModel):
    """Counts what became of the items of a source, by kind: `files`, `members`, `rows`, `columns`.

    Example:
        >>> account = pipelines.Account()
        >>> account.use("files", 2)
        >>> account.leave_out("files", "no image", "notes.txt")
        >>> account.change("files", "turned upright", "cat/1.jpg")
        >>> print(account)
        files: 3 found, 2 used, 1 left out
          left out, no image: 1 (notes.txt)
          files turned upright: 1 (cat/1.jpg)

    Attributes:
        kinds: The fates of items by kind.
    """

    kinds: dict[str, Fates] = Field(default_factory=dict)

    def use(self, kind: str, count: int) -> None:
        """Counts items that were found and are used."""
        fates = self._fates(kind)
        fates.found += count
        fates.used += count

    def leave_out(self, kind: str, reason: str, *items: object, count: int | None = None) -> None:
        """Counts items that were found and are not used.

        Args:
            kind: Their kind.
            reason: Why, in a few words without their names.
            *items: Their names, or of some of them if `count` is given.
            count: Their number.
        """
        count = len(items) if count is None else count
        if count:
            fates = self._fates(kind)
            fates.found += count
            group = fates.left_out.setdefault(reason, Group())
            group.add(count, map(printable, items[:_NUM_EXAMPLES]), guessed=False)

    def move_to_left_out(self, kind: str, reason: str, item: object) -> None:
        """Counts an item as left out that was counted as used before."""
        self.use(kind, -1)
        self.leave_out(kind, reason, item)

    def add_clutter(self, kind: str, count: int) -> None:
        """Counts items that systems create and that are no data, such as `.DS_Store`."""
        fates = self._fates(kind)
        fates.found += count
        fates.clutter += count

    def change(
        self,
        kind: str,
        change: str,
        *items: object,
        count: int | None = None,
        guessed: bool = False,
    ) -> None:
        """Counts used items that are not taken as they are, or whose meaning was derived.

        Args:
            kind: Their kind.
            change: What was done, such as `turned upright` or `decoded as windows-1252`.
            *items: Their names, or of some of them if `count` is given.
            count: Their number.
            guessed: Whether the data do not tell that this is right.
        """
        count = len(items) if count is None else count
        if count:
            group = self._fates(kind).changed.setdefault(change, Group())
            group.add(count, map(printable, items[:_NUM_EXAMPLES]), guessed)

    def merge(self, other: Account) -> None:
        """Adds what another account counted."""
        for kind, fates in other.kinds.items():
            target = self._fates(kind)
            target.found += fates.found
            target.used += fates.used
            target.clutter += fates.clutter
            pairs = ((target.left_out, fates.left_out), (target.changed, fates.changed))
            for groups, others in pairs:
                for name, group in others.items():
                    merged = groups.setdefault(name, Group())
                    merged.add(group.count, group.examples, group.guessed)

    def check_strict(self) -> None:
        """Raises a `DataError` that lists everything that was left out or guessed, if anything."""
        problems = []
        for kind, fates in self.kinds.items():
            problems += [
                f"{kind} left out, {why}: {group}" for why, group in fates.left_out.items()
            ]
            problems += [
                f"{kind} {change}: {group}"
                for change, group in fates.changed.items()
                if group.guessed
            ]
        if problems:
            raise DataError(f"--strict: {'; '.join(problems)}")

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def __str__(self) -> str:
        return "\n".join(line for kind, fates in self.kinds.items() for line in fates.lines(kind))

    def _fates(self, kind: str) -> Fates:
        return self.kinds.setdefault(kind, Fates())


def printable(item: object) -> str:
    """Returns a name as text that can be printed and stored, also if it is not UTF-8."""
    return os.fsencode(str(item)).decode("utf-8", "backslashreplace")


def save_account(directory: AnyPath, account: Account) -> None:
    """Stores an account in a folder that has no index yet."""
    (directory / ACCOUNT_NAME).write_bytes(f"{account.model_dump_json(indent=2)}\n".encode())


def load_account(directory: str | AnyPath) -> Account:
    """Returns the stored account of a packed folder, or an empty one.

    Example:
        >>> print(pipelines.load_account("data/digits") or "no account")
        no account

    Raises:
        DataError: The file is damaged.
    """
    path = storage.at(directory) / ACCOUNT_NAME
    try:
        return Account.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return Account()
    except ValidationError:
        raise DataError(f"{path}: not an account of this version; delete this file") from None


def print_account(directory: AnyPath) -> None:
    """Prints the stored account of a packed folder, if it has one."""
    if account := load_account(directory):
        print(account)
