"""Creates, rebuilds, builds, and checks the user's model in a strategy's scope."""
