"""Implements encode, prefill and decode as plain classes, and the pipeline with all three in one process."""
