"""Shared by all commands of `pipelines`: command lines, tables, and tasks in processes."""
