"""Keeps what was made of media on disk, so that it outlives workers: files, names and room, no tensors."""
