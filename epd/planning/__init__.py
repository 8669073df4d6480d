"""The search for the layout with the highest goodput per device."""
