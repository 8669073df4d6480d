"""Media are looked at and decoded in child processes without secrets and within limits."""
