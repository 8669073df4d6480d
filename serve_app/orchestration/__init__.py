"""Takes requests through the stages: planning, placement, retries, roles."""
