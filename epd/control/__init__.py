"""Decisions about requests and workers: who is admitted, who gets what, who is to blame."""
