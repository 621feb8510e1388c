"""The table of extension points: what users override, assign and return, and what follows."""
