"""What one replica sees while it computes."""
