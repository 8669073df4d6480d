"""Measures what a model gets right, and what reducing its visual tokens costs: questions, verdicts, rows."""
