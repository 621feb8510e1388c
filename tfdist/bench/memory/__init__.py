"""Memory of a training: whole, in copies, and divided."""
