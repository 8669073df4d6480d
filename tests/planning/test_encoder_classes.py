"""A plan with encoders on another kind of device: the best of all layouts, served as classes of workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from epd.errors import InfeasibleError, RequestError
from epd.planning.asked import plan
from epd.planning.files import load_plan
from epd.planning.goodput import goodput
from epd.planning.plan import Plan
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.serve_app.app_args import AppArgs
from epd.topology import parse_topology

MODEL, LARGE, SMALL = "qwen2.5-vl-7b", "qwen2.5-vl-7b@h100", "qwen2.5-vl-7b@l4"
OPTIONS: dict[str, Any] = {"profile": LARGE, "encoder_profile": SMALL, "slo_ttft_s": 8.0, "slo_tpot_s": 0.1}


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(1, encoders=4, **OPTIONS)


def test_a_plan_of_two_kinds_is_served_as_classes(found: Plan, tmp_path: Path) -> None:
    assert str(found.topology) == "4e1pd"
    assert found.num_devices == 5
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(found.record()), encoding="utf-8")
    args = AppArgs(**load_plan(path).app_options())
    args.check_workers()
    assert {name: str(part) for name, part in args.parts.items()} == {"encoders": "4e", "language-pd": "1pd"}
    kinds = {name: (each.device, each.accelerator_type) for name, each in args.worker_classes.items()}
    assert kinds == {"encoders": ("cuda", "L4"), "language-pd": ("cuda", "H100")}
    prices = [load_profile(name).price_per_hour for name in (LARGE, SMALL)]
    assert None not in prices
    each = found.profile.price_per_hour
    assert each is not None
    assert 5 * each == pytest.approx(prices[0] + 4 * prices[1])  # type: ignore[operator]
    assert found.verdict == "split, as asked: encoders on l4"


def test_the_plan_is_the_best_of_all_layouts_tried_one_by_one() -> None:
    found = plan(2, encoders=2, **OPTIONS)
    winner = found.winner.candidate
    served = {
        layout: goodput(
            found.profile, replace(winner.deployment, topology=parse_topology(layout)), found.demand
        )
        for layout in ("2e2pd", "2e1p1d")
    }
    assert str(found.topology) in served
    assert found.goodput >= 0.97 * max(served.values())


def test_slower_encoders_serve_less_and_more_of_them_serve_more(found: Plan) -> None:
    """Beside three workers, so that encoders bind: a pass of one waits for the host."""
    large, small = load_profile(LARGE), load_profile(SMALL)

    def served(encoders: Profile, number: int) -> float:
        deployment = replace(found.winner.candidate.deployment, topology=parse_topology(f"{number}e3pd"))
        return goodput(large.encoding_on(encoders, number, 3), deployment, found.demand)

    assert served(small, 1) < 0.9 * served(large, 1)
    assert served(small, 1) < 0.9 * served(small, 3)


@pytest.mark.parametrize(
    ("gpus", "options", "error"),
    [
        (1, {"encoders": 4}, RequestError("received 4 encoders with the profile None beside 1 devices")),
        (1, {"encoder_profile": SMALL}, RequestError("received 0 encoders with the profile")),
        (6, {"encoders": 4, "encoder_profile": SMALL}, RequestError("8 devices in all and one a worker")),
        (
            1,
            {"encoders": 1, "encoder_profile": "qwen3-vl-8b@l4"},
            RequestError("for encoders; allowed: two of one model"),
        ),
    ],
)
def test_encoders_that_cannot_be_planned_are_refused_in_one_line(
    gpus: int, options: dict[str, Any], error: Exception
) -> None:
    with pytest.raises((RequestError, InfeasibleError)) as refused:
        plan(gpus, profile=LARGE, **options)
    assert str(error) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_encoders_on_a_cpu_have_its_threads(found: Plan) -> None:
    on_cpu = replace(load_profile(SMALL), device="cpu", num_threads=4, dtype="float32")
    classes = replace(found, encoders=on_cpu).record()["settings"]["worker_classes"]
    assert classes["encoders"] == {"roles": "e", "device": "cpu", "dtype": "float32", "num_threads": 4}
