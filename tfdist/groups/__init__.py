"""Process groups: collectives between the processes that train together, independent of models."""
