"""Runs batch jobs in one process: a thread each for decoding, encoding and the language model."""
