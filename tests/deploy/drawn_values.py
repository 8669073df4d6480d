"""Draws values of docs/deploy/chart that its schema takes."""

from __future__ import annotations

import random
from typing import Any

TOPOLOGIES = ("1epd", "1e1pd", "1ep1d", "1e1p1d", "2e1p1d", "3e2p2d", "2e2p4d", "4e2pd", "8epd", "1e1p12d")


def drawn(seed: int) -> dict[str, Any]:
    """Returns values, each object present in half of the draws."""
    draw = random.Random(seed)
    media = draw.randint(1, 6)
    whole = {
        "image": f"registry.example/epd:{draw.randint(1, 99)}",
        "apiKey": {"secret": f"s{seed}", "key": "k"},
        "rayVersion": f"2.{draw.randint(52, 60)}.0",
        "args": {
            "topology": draw.choice(TOPOLOGIES),
            "max_requests": draw.randint(1, 4224),
            "drain_s": draw.randint(1, 600),
            "model": draw.choice(["/models/a <b> & c", "Qwen/Qwen3-VL-8B-Instruct"]),
        },
        "fronts": {"replicas": draw.randint(1, 4)},
        "media": {"replicas": media, "cpus": draw.randint(1, 8), "memory": f"{draw.randint(1, 64)}Gi"},
        "stages": {
            "workersPerPod": draw.randint(1, 8),
            "cpus": draw.randint(1, 8),
            "gpus": draw.choice([0, 0.25, 0.33, 0.5, 1, 2]),
            "memory": f"{draw.randint(1, 512)}Gi",
        },
        "sharedMemory": f"{draw.randint(1, 64)}Gi",
        "autoscaling": {
            "enabled": draw.random() < 0.5,
            "maxMedia": draw.randint(1, 12),
            "maxStages": draw.randint(1, 40),
        },
        "networkPolicy": {
            "enabled": draw.random() < 0.8,
            "operatorNamespace": draw.choice(["ray", "default"]),
        },
        "podDisruptionBudget": {"enabled": draw.random() < 0.5},
        "podMonitor": {"enabled": draw.random() < 0.5, "interval": draw.choice(["15s", "1m"])},
        "dashboard": {"enabled": draw.random() < 0.1},
    }
    return {name: value for name, value in whole.items() if draw.random() < 0.5}
