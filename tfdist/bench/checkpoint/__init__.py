"""What checkpoints cost a training."""
