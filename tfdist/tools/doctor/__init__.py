"""Checks a machine before a run, and prints the command that fixes each problem."""
