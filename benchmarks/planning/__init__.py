"""Measures the planner and the simulator against live runs and published tables."""
