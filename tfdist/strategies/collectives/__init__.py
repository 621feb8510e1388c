"""Sums over replicas in every form: packed, of varying sizes, between hosts, of equal variables."""
