"""How fast each worker is found to be, and that choices follow while it changes. Time is simulated."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from epd.control.routing import InFlight, Router
from epd.control.speeds import Speeds

PATCHES, GROUPS = 100, 12  # of a group, of a video


@dataclass
class Encoder:
    """Encodes groups one after the other. speed: patches a second, which may change at any time."""

    speed: float
    waiting: deque[float] = field(default_factory=deque)  # when the video of each group came
    until_s: float = 0.0
    done: float = 0.0
    busy_s: float = 0.0


def run(router: Router, load: float) -> tuple[Counter[str], float]:
    """Sends videos at a share of what two encoders can do, of which e1 gets five times slower after 20 s.

    Returns the groups that each has encoded since, and the mean seconds of a video.
    """
    encoders = {"e0": Encoder(1000.0), "e1": Encoder(1000.0)}
    counted, ended_s, now_s, next_s = Counter[str](), dict[float, float](), 0.0, 0.0
    while now_s < 200.0:
        busy = [(each.until_s, name) for name, each in encoders.items() if each.waiting]
        if busy and min(busy)[0] <= next_s:
            now_s, name = min(busy)
            finish(router, name, encoders[name], now_s, ended_s)
            counted[name] += now_s > 50.0
            continue
        now_s = next_s
        if now_s > 20.0:
            encoders["e1"].speed = 200.0
        next_s += GROUPS * PATCHES / (load * sum(each.speed for each in encoders.values()))
        for _ in range(GROUPS):
            name = router.encoder(("e0", "e1"), num_patches=PATCHES)
            router.add(name, encode_patches=PATCHES)
            each = encoders[name]
            each.waiting.append(now_s)
            if len(each.waiting) == 1:
                each.until_s = now_s + PATCHES / each.speed
    took_s = [end_s - came_s for came_s, end_s in ended_s.items() if came_s > 50.0]
    return counted, sum(took_s) / len(took_s)


def finish(router: Router, name: str, encoder: Encoder, now_s: float, ended_s: dict[float, float]) -> None:
    """Finishes the group that an encoder works on. ended_s: of each video, by when it came."""
    ended_s[encoder.waiting.popleft()] = now_s
    encoder.done += PATCHES
    encoder.busy_s += PATCHES / encoder.speed
    router.add(name, encode_patches=-PATCHES)
    if router.speeds is not None:
        router.speeds.add(name, "encode", encoder.done, encoder.busy_s)
    encoder.until_s = now_s + PATCHES / encoder.speed


@pytest.mark.parametrize("load", [0.3, 0.6, 0.95])
def test_an_encoder_that_gets_five_times_slower_gets_a_fifth_of_the_work(load: float) -> None:
    """The groups of a video are there at once, and its last one is what the answer waits for."""
    counted, took_s = run(Router(speeds=Speeds()), load)
    assert 0.15 <= counted["e1"] / counted["e0"] <= 0.25
    _, without_s = run(Router(), load)
    assert took_s < 0.7 * without_s


def test_an_idle_encoder_that_is_slow_is_left_out_while_a_busy_one_is_done_sooner() -> None:
    router = Router(speeds=Speeds())
    assert router.speeds is not None
    router.speeds.add("e0", "encode", 1000, 1.0)
    router.speeds.add("e1", "encode", 200, 1.0)
    router.add("e0", encode_patches=300)
    assert router.encoder(("e0", "e1"), num_patches=100) == "e0", "0.4 s instead of 0.5 s"
    router.add("e0", encode_patches=200)
    assert router.encoder(("e0", "e1"), num_patches=100) == "e1", "0.5 s instead of 0.6 s"
    assert router.encoder(("e0", "e1"), wanted="e0") == "e0"
    router.add("e1", encode_patches=20)
    assert router.encode_backlog("e1") == 100
    assert Router().encode_backlog("e1") == 0


def test_prompts_go_where_they_are_computed_first_and_answers_where_passes_are_short() -> None:
    speeds = Speeds()
    router = Router(speeds=speeds)
    speeds.add("p0", "prefill", 100, 1.0)
    speeds.add("p1", "prefill", 400, 1.0)
    video = (("video", 1000),)
    assert list(router.prefill_order(("p0", "p1"), video)) == ["p1", "p0"]
    router.contents.remember_prefix("p0", video)
    assert list(router.prefill_order(("p0", "p1"), video)) == ["p0", "p1"], "it has nearly all of it"
    router.add("p0", prefill_tokens=300)
    assert list(router.prefill_order(("p0", "p1"), video)) == ["p1", "p0"]
    speeds.add("d0", "decode", 10, 1.0)
    speeds.add("d1", "decode", 40, 1.0)
    assert list(router.decode_order(("d0", "d1"))) == ["d1", "d0"]
    router.add("d1", num_decodes=4)
    assert list(router.decode_order(("d0", "d1"))) == ["d0", "d1"]


def test_a_worker_that_is_not_known_is_tried_and_one_that_restarts_is_learned_again() -> None:
    speeds = Speeds()
    assert speeds.relative("e0", "encode") == 1.0
    speeds.add("e0", "encode", 1000, 1.0)
    speeds.add("e1", "encode", 250, 1.0)
    assert [speeds.relative(name, "encode") for name in ("e0", "e1", "e2")] == [1.0, 0.25, 1.0]
    assert speeds.relative("e1", "prefill") == 1.0, "each stage is learned by itself"
    speeds.add("e1", "encode", 500, 0.5)
    assert speeds.relative("e1", "encode") == 1.0
    speeds.add("e1", "encode", 500, 0.5)
    assert speeds.relative("e1", "encode") == 1.0, "nothing new was done"
    router = Router(speeds=speeds)
    speeds.add("e2", "encode", 100, 1.0)
    router.forget("e2")
    assert speeds.relative("e2", "encode") == 1.0
    assert router.load("e2") == InFlight()
