"""A script for sbatch that runs the workers with srun, whose variables `tfdist.cluster` reads."""

from __future__ import annotations

import shlex

from tfdist.errors import REQUEUE
from tfdist.launcher.options import Options

_SCRIPT = """\
#!/bin/bash
{directives}

set -uo pipefail
for restart in {{0..{max_restarts}}}; do
    # Lines begin with the rank; one task that fails ends all; ranks fill the nodes in their order.
    srun --label --kill-on-bad-exit=1 --distribution=block \\
        {command}
    code=$?
    # Preempted, or out of time: all is saved, and the same job goes on from there.
    if [ $code = {requeue} ]; then scontrol requeue "$SLURM_JOB_ID"; exit $code; fi
    if [ $code = 0 ]; then break; fi
done
exit $code
"""


def script(options: Options) -> str:
    """Returns the script: it runs the command, again after a failure if it may."""
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
        "signal": "USR1@120",
        "open-mode": "append",
    }
    directives = [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value]
    return _SCRIPT.format(
        directives="\n".join([*directives, "#SBATCH --requeue"]),
        command=shlex.join(options.elsewhere),
        max_restarts=options.max_restarts,
        requeue=REQUEUE,
    )
