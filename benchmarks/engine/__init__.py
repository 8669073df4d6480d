"""Measures the engine: passes, steps, drafts, loading, and profiles on a GPU."""
