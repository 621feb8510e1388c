"""Terminates a run whose workers wait for a failed worker, and names that worker.

Every worker reports its progress to rank 0 once a second, and rank 0 replies with its own report.
`status` defines the reports, `protocol` exchanges them, `verdict` finds the failed worker,
`heartbeat` runs the exchange in a thread, and `watchdog` is the trainer's interface. Before the
first report, `tfdist.cluster.deadline` limits how long workers wait.
"""
