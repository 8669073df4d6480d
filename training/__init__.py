"""How `shapes-vl` is made, step by step: `clips`, `vision`, `language`, `evaluate`; see
docs/training.md."""
