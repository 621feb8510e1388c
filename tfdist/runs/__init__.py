"""Commands on the folders that training runs leave under `runs/`."""
