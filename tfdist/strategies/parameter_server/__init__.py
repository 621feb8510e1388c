"""Asynchronous training: servers hold the variables, workers change them at their own pace."""
