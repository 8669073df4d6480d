"""Loads weights: of a stage alone, tensor by tensor, in the layout in which they are multiplied."""
