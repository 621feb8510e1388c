"""Ends a run whose workers wait for one that will not come, and says for which.

Every worker reports to rank 0 once a second how far it is, and rank 0 tells all. `status` holds how
far this one is, `reporter` and `monitor` send and receive reports, `verdict` judges them, `exit`
ends the process, `heartbeat` is the thread of all this, and `watchdog` is what the trainer uses.
"""
