"""A script for sbatch that runs the workers with srun, whose variables `tfdist.cluster` reads."""

from __future__ import annotations

import shlex

from tfdist.launcher.flags import Options

_SCRIPT = """\
#!/bin/bash
{directives}

set -euo pipefail
# Lines begin with the rank; one task that fails ends all; ranks fill the nodes in their order.
srun --label --kill-on-bad-exit=1 --distribution=block \\
    {command}
"""


def script(options: Options) -> str:
    """Returns the script; its last line is the command to run."""
    wanted = {
        "job-name": options.name,
        "output": f"{options.name}-%j.log",
        "ntasks": options.num_workers,
        "nodes": len(options.hosts) or None,
        "nodelist": ",".join(options.hosts) or None,
        "cpus-per-task": options.cpus_per_worker,
        "gpus-per-task": options.gpus_per_worker or None,
        "time": "24:00:00",
        # Before the time is up, so that the state is saved.
        "signal": "INT@120",
    }
    directives = [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value]
    return _SCRIPT.format(directives="\n".join(directives), command=shlex.join(options.elsewhere))
