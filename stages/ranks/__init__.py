"""Runs the ranks of a worker: processes that share the layers of its language model."""
