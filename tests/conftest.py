"""Runs before any test module is imported: offline, few threads, quiet."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ.setdefault("OMP_NUM_THREADS", "2")
