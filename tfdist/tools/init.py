"""`tfdist init`: asks six questions and writes a configuration and its command line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.prompt import Prompt

from tfdist.cluster.launcher.plan import parse_hosts
from tfdist.console import command
from tfdist.errors import ConfigurationError
from tfdist.run import recipe
from tfdist.strategies import STRATEGIES

_DESCRIPTION = "Asks six questions, writes a configuration, and prints the command that uses it."


@command.main
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and returns its exit code: 0, 1 for an error, 130 for an interrupt."""
    parser = command.parser("tfdist init", _DESCRIPTION)
    parser.add_argument("--file", default="tfdist.yaml", metavar="FILE", help="file to write")
    path = Path(command.parse(parser, arguments).file)
    if path.exists():
        raise ConfigurationError(f"{path} already exists. Choose another file with --file.")
    try:
        fields, launch = _answers()
    except EOFError:
        raise ConfigurationError(
            "The input ended early: expected six answers, one per line."
        ) from None
    path.write_text(yaml.safe_dump(fields, sort_keys=False))
    line = ["python", "-m", "tfdist.launch" if launch else "tfdist.train", *launch]
    print(f"Wrote {path}. Train with\n    {shlex.join([*line, '--config', str(path)])}")


def _answers() -> tuple[dict[str, Any], list[str]]:
    print(f"Recipes: {', '.join(recipe.names())}")
    name = _ask("Recipe (one of these, ./mine.py, or a module)", "digits", _recipe)
    hosts = _ask("Hosts (this one, or names: a,b,...)", "this one", _hosts)
    workers = _ask("Processes per host (a number)", "1", _number)
    devices = _ask("Devices per process (all, or a number)", "all", _devices)
    several = workers * len(hosts or "-") > 1
    default = "multi_worker" if several else "one_device" if devices == 1 else "mirrored"
    # Strategies for this number of processes, hosts and devices.
    single_device = ("one_device", "horovod") if devices > 1 else ()
    suitable = [
        name
        for name, declared in STRATEGIES.items()
        if name not in single_device
        and not (several and devices > 1 and declared.by_horovod and declared.min_devices == 1)
        and not 0 < devices < declared.min_devices
        and (declared.supports_processes or not several)
        and not (declared.asynchronous and hosts)
    ]
    strategy = Prompt.ask("Strategy", choices=suitable, default=default)
    fields = {"recipe": name, "strategy": strategy}
    servers = several and STRATEGIES[strategy].asynchronous
    if devices and not servers:  # with servers, the launcher sets the number of devices
        fields["devices"] = devices
    fields["batch_size"] = _ask("Global batch size (a number)", "64", _number)
    if not several:
        return fields, []
    flags = ["--num-workers", str(workers)]
    if hosts:
        flags = ["--hosts", ",".join(f"{host}:{workers}" for host in hosts)]
    return fields, flags + (["--num-ps", "1"] if servers else [])


def _ask(question: str, default: str, check: Callable[[str], Any]) -> Any:
    """Asks until an answer passes the check, and returns the result of the check."""
    while True:
        try:
            return check(Prompt.ask(question, default=default).strip())
        except ConfigurationError as error:
            print(error)


def _recipe(text: str) -> str:
    if text not in recipe.names():
        recipe.find(text)
    return text


def _hosts(text: str) -> list[str]:
    return [] if text == "this one" else list(parse_hosts(text))


def _devices(text: str) -> int:
    return 0 if text == "all" else _number(text)


def _number(text: str) -> int:
    if not text.isdecimal() or text == "0":
        raise ConfigurationError(f"Expected a whole number of at least 1, got {text!r}.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
