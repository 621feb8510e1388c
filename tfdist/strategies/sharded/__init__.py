"""Sharded data parallelism: each device keeps a part of what training needs besides activations."""
