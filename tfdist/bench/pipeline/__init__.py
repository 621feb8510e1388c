"""The pipeline benchmark: speed-up over one device, against what the bubble leaves."""
