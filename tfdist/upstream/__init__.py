"""All uses of private names of Keras and TensorFlow; README.md lists them."""
