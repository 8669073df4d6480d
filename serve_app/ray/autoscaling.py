"""Sets the replicas of Serve's deployments to the advised numbers: policies for an AutoscalingConfig.

    board: advice --> replicas: record_autoscaling_stats() --> Serve's controller: policy --> replicas

    autoscaling_config:
      policy: {policy_function: "epd.serve_app.ray.autoscaling:stage_replicas"}

Advice is steady already (`epd/control/elasticity/replicas.py`), so Serve's own delays belong at 0 s. Serve
pickles this module's functions by value and runs them in its controller, ten times a second: they import
nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# Name under which replicas record the number that is advised for their deployment.
ADVISED = "advised"
# Older advice is that of somebody who is gone: the number stays as it is.
MAX_AGE_S = 60.0


def advice_stats(num_replicas: int | None) -> dict[str, float]:
    """Returns what a replica records for the policies: nothing without advice."""
    return {} if num_replicas is None else {ADVISED: float(num_replicas)}


def stage_replicas(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Returns the number of stage workers for Serve, and the policy's state, which is none."""
    return _advised_replicas(ctx), {}


def media_replicas(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Returns the number of media workers for Serve, and the policy's state, which is none."""
    return _advised_replicas(ctx), {}


def _advised_replicas(ctx: AutoscalingContext) -> int:
    """Returns the newest advice of any replica, or the number that Serve aims at now, within the bounds."""
    advised = _newest_advice(ctx)
    num = ctx.target_num_replicas if advised is None else advised
    return min(max(num, ctx.capacity_adjusted_min_replicas), ctx.capacity_adjusted_max_replicas)


def _newest_advice(ctx: AutoscalingContext) -> int | None:
    """Returns None without advice that is recent and a number."""
    series = (ctx.raw_metrics or {}).get(ADVISED, {}).values()
    points = [point for each in series for point in each if math.isfinite(point.value)]
    newest = max(points, key=lambda point: point.timestamp, default=None)
    if newest is None or (ctx.current_time or newest.timestamp) - newest.timestamp > MAX_AGE_S:
        return None
    return math.ceil(newest.value)
