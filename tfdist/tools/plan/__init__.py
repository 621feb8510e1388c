"""`tfdist plan`: predicts the memory and the scaling of a training run."""
