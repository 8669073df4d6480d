"""Describes the costs of a model's stages on a device: measured, or computed and marked as such."""
