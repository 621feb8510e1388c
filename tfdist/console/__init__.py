"""What every command shares: flags and exit codes, files written whole."""
