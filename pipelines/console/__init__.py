"""What all commands of `pipelines` use: flags and exit codes, tables, tasks in processes."""
