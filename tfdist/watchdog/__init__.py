"""Ends a run whose workers wait for one that can no longer take part, and names that one.

Every worker reports its progress to rank 0 once a second, and rank 0 answers each with its own.
`status` has what a worker reports, `protocol` sends and receives it, `verdict` judges it,
`heartbeat` runs all of this in a thread, and `watchdog` is what the trainer uses. `start_up` and
`deadline` limit the waiting before that.
"""
