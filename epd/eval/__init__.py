"""What a model gets right, and what it costs to reduce its visual tokens: questions, verdicts, rows."""
