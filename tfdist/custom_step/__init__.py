"""A `train_step` or `test_step` that a model's class overrides, run over replicas."""
