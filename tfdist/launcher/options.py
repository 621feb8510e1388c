"""What a command line of `python -m tfdist.launch` comes to."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Options:
    """The flags, as their help describes them, and the command."""

    command: tuple[str, ...]
    num_workers: int
    num_ps: int
    via: str
    gpus_per_worker: int
    hosts: dict[str, int]
    on: str | None
    port: int
    grace: int
    max_restarts: int
    elastic: tuple[int, int] | None
    dry_run: bool
    print_slurm: bool
    print_k8s: str | None
    name: str
    image: str
    cpus_per_worker: int | None
    #: Of the training command, as far as `run.strategy_of_workers` knows it.
    strategy: str = ""
    #: Whether Horovod joins the processes of that.
    by_horovod: bool = False

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The command as another machine or image finds it: by its own Python."""
        program, *arguments = self.command
        return ("python" if program == sys.executable else program, *arguments)

    @property
    def trains(self) -> bool:
        """Whether the command is that of the training command."""
        return self.command[1:3] == ("-m", "tfdist.train")

    @property
    def going_on(self) -> Options:
        """With the training command told to go on from its newest checkpoint, unless it is told."""
        if not self.trains or any(word.partition("=")[0] == "--resume" for word in self.command):
            return self
        return replace(self, command=(*self.command, "--resume", "auto"))
