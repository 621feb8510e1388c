"""Every use of a private name of Keras and TensorFlow; README.md lists them."""
