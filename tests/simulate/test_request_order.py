"""Request order: one policy for the live scheduler and for simulated encoders and prefill workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from epd.kv.scheduled_request import RequestOrder
from epd.kv.scheduling import SchedulerConfig
from epd.profiles.analytic import analytic_profile
from epd.serve_app.cli.program import app
from epd.simulate import Deployment, JobMaker, Simulation
from epd.simulate.records import SimulationResult
from epd.topology import parse_topology
from epd.workload.requests import PlannedRequest, RequestShape, Resolution

# Reading takes no time, so that images reach the encoder as they come.
PROFILE = replace(analytic_profile("a100-80gb", "qwen2.5-vl-7b"), images=None)
LONG, SHORT = RequestShape(4000, 2), RequestShape(40, 2)


def run(shapes: list[RequestShape], order: RequestOrder, topology: str = "1e1pd") -> SimulationResult:
    """Simulates requests a microsecond apart, one at a time in prefill and in the tower."""
    limits = SchedulerConfig(8192, 1, 8192, order=order)
    deployment = Deployment(
        parse_topology(topology), limits, max_batch_patches=1, cpu_threads=64, is_overlapped=False
    )
    requests = [
        PlannedRequest(index, index * 1e-6, shape, index, index) for index, shape in enumerate(shapes)
    ]
    return Simulation(PROFILE, deployment).run(JobMaker(PROFILE).jobs(requests))


def first_tokens(result: SimulationResult) -> list[int]:
    """Returns requests in the order of their first tokens."""
    return [int(index) for index in np.argsort(result.rows["first_token"], kind="stable")]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fcfs", [0, 1, 2, 3]), ("shortest", [0, 2, 3, 1]), ("least_slack", [0, 1, 2, 3])],
)
def test_texts_are_prefilled_in_order(order: RequestOrder, expected: list[int]) -> None:
    """The first is under way when the others come; a long one that came earlier has the least slack."""
    assert first_tokens(run([LONG, LONG, SHORT, SHORT], order)) == expected


def test_a_long_prompt_that_comes_a_little_later_has_less_slack() -> None:
    assert first_tokens(run([LONG, SHORT, LONG, SHORT], "least_slack")) == [0, 2, 1, 3]
    assert first_tokens(run([LONG, SHORT, LONG, SHORT], "fcfs")) == [0, 1, 2, 3]


def test_encoders_keep_the_order_too() -> None:
    large = RequestShape(10, 2, (Resolution(2000, 2000),))
    small = RequestShape(10, 2, (Resolution(2000, 400),))
    result = run([large, large, small, small], "shortest")
    assert result.rows["encoded"][1] == result.rows["encoded"].max()
    result = run([large, large, small, small], "fcfs")
    assert result.rows["encoded"][3] == result.rows["encoded"].max()


def test_the_shortest_first_have_the_least_mean_wait() -> None:
    shapes = [LONG, SHORT, SHORT, LONG, SHORT, LONG, SHORT, SHORT]
    means = {order: float(run(shapes, order).ttft_s.mean()) for order in ("fcfs", "shortest")}
    assert means["shortest"] < 0.8 * means["fcfs"]


def test_the_command_takes_an_order(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["simulate", "--workload", "images", "--rate", "1", "--num-requests", "5"]
    assert app([*options, "--order", "shortest"], standalone_mode=False) in (None, 0)
    capsys.readouterr()
    assert app([*options, "--order", "random"], standalone_mode=False) == 2
    assert "must be fcfs, shortest, least_slack" in capsys.readouterr().err
