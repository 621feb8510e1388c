"""Every private name of Keras and TensorFlow that tfdist needs, in one place: see README.md."""
