"""Asynchronous training: servers hold the variables, workers update them at their own pace."""
