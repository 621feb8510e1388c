"""`python -m tfdist.bench unet`: one device against two, by data and by layers."""
