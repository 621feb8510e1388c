"""What the training command reads and leaves behind: flags, recipe, folder, reports."""
