"""The `tfdist runs` command, which manages the run folders below `runs/`."""
