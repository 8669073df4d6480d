"""Keeps keys and values of media on disk, so that they outlive workers: files, names and room, no tensors."""
