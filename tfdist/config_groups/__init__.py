"""The fields of the configuration, in the groups that `--help` shows. None imports TensorFlow."""
