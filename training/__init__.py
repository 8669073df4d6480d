"""Makes `shapes-vl`, step by step: `clips`, `vision`, `language`, `evaluate`; see docs/training.md."""
