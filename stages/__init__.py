"""Encode, prefill and decode as plain classes, and the colocated pipeline: all three in one process."""
