"""A request on its way through the stages: planning, placement, retries, roles."""
