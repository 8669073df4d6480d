"""Makes `shapes-vl`, step by step: `clips`, `vision`, `language`, `evaluate`; see docs/training.md.

Those of a model that reads timestamps are `lane_vision` and `lane_language`.
"""
