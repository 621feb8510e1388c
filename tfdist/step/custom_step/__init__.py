"""Training and test steps that a model's class overrides, on shares of the batch."""
