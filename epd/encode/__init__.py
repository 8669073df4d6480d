"""Decides which encoder takes which groups, which are batched and which the encoder cache keeps."""
