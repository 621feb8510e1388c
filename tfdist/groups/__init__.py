"""Process groups: how the processes that train together exchange values. They know no models."""
