"""Measures the accuracy of a model and the cost of reducing its visual tokens: questions, verdicts, rows."""
