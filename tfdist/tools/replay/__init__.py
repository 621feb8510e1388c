"""The `tfdist replay` command, which repeats a step of a run and shows what happened in it."""
