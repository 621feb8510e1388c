"""Groups of processes that measure when they are told: started once, asked in turns."""
