"""What the commands of `pipelines` share: flags and exit codes, tables, tasks side by side."""
