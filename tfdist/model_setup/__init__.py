"""The user's model becomes ours: made or rebuilt in a strategy's scope, and checked."""
