"""The training command: flags, recipe, run folder, and reports."""
