"""Provides published figures of other systems, and the settings that repeat them in the simulator."""
