"""Images per second of the input pipeline, beside the limit and other readers."""
