"""What replaces a function of Keras or TensorFlow while replicas are traced."""
