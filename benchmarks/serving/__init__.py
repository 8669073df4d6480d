"""Measures a whole server: its latencies, caches, start, roles, batches and memory."""
