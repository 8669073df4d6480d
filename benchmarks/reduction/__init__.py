"""Measures fewer visual tokens: their costs, their accuracy, and switches of retention."""
