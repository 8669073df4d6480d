"""Benchmarks by subject: `python -m benchmarks.FOLDER.NAME` writes benchmarks/results.

front       what the server's front costs, and how messages travel
serving     a whole server: latencies, caches, start, roles, batches, memory
elasticity  roles and replicas that follow traffic
engine      passes, steps, drafts, loading, profiles of a GPU
encode      groups, towers, processors
reduction   fewer visual tokens: costs, accuracy, retention
planning    planner and simulator against live runs and published tables
video       decoding against other readers
"""
