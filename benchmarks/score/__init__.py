"""Scores the simulator's predictions against the application on the shared cores of one machine."""
