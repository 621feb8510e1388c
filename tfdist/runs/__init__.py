"""The `python -m tfdist.runs` command, which manages the run folders below `runs/`."""
