"""Code that all commands share: flags, exit codes, tables, and atomic file writes."""
