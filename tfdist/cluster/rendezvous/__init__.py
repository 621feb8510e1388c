"""How workers that know only rank 0's address, or MPI, learn each other's."""
