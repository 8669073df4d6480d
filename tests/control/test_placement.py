"""Stories of where a request goes: which worker is asked what, and what a refusal leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from epd.control.placement import Candidates, Placement, PlacementPolicy, Step, Steps
from epd.control.routing import InFlight, Router
from epd.errors import UnavailableError
from epd.topology import Stage, parse_topology

VIDEO = (("video", 900),)
TOKENS = 1000


@dataclass
class FakeWorker:
    """A worker that has room for so many, as prefill and as decode worker."""

    name: str
    roles: frozenset[Stage]
    room: dict[Step, int] = field(default_factory=lambda: {"submit": 99, "reserve": 99})
    is_closed: bool = False

    def takes(self, stage: Stage) -> bool:
        return stage in self.roles and not self.is_closed


class Cluster:
    """Drives the policy as the server and the simulator do, and notes what is asked."""

    def __init__(self, topology: str, max_prefills: int | None = None) -> None:
        self.workers = {
            spec.name: FakeWorker(spec.name, spec.roles) for spec in parse_topology(topology).workers()
        }
        self.router = Router()
        self.policy = PlacementPolicy(
            self.router, lambda: Candidates(self.workers.values()), max_prefills=max_prefills
        )
        self.asked: list[str] = []

    def place(
        self,
        media: Sequence[tuple[str, int]] = (),
        *,
        is_placed: bool = True,
        allowed: Sequence[str] | None = None,
    ) -> Placement:
        placement = Placement(self.router, TOKENS)
        filtered = None if allowed is None else lambda _, names: [name for name in names if name in allowed]
        assert self._drive(self.policy.place(placement, media, filtered), placement) is is_placed
        return placement

    def _drive(self, steps: Steps, placement: Placement) -> bool:
        try:
            step = next(steps)
            while True:
                step = steps.send(self._answer(step, placement))
        except StopIteration as end:
            return bool(end.value)

    def _answer(self, step: Step, placement: Placement) -> bool:
        name = placement.prefill_worker if step == "submit" else placement.decode_worker
        self.asked.append(f"{step} {name}")
        room = self.workers[name].room
        if step == "release":
            room["reserve"] += 1
            return True
        room[step] -= 1
        if room[step] < 0:
            room[step] = 0
            return False
        return True


def test_room_for_the_answer_is_reserved_before_the_prompt_is_submitted() -> None:
    cluster = Cluster("1e1p1d")
    placement = cluster.place()
    assert cluster.asked == ["reserve d0", "submit p0"]
    assert (placement.prefill_worker, placement.decode_worker) == ("p0", "d0")
    assert placement.touched == {"p0", "d0"}
    assert cluster.router.in_flight("p0") == InFlight(prefill_tokens=TOKENS, num_prefills=1)
    assert cluster.router.in_flight("d0") == InFlight(num_decodes=1)


def test_a_worker_that_prefills_and_decodes_is_asked_once() -> None:
    cluster = Cluster("1e2pd")
    assert cluster.place().is_merged
    assert cluster.asked == ["submit pd0"]
    assert cluster.place().prefill_worker == "pd1"


def test_requests_are_spread_by_what_was_sent() -> None:
    cluster = Cluster("1e2p2d")
    workers = [cluster.place() for _ in range(4)]
    assert [each.prefill_worker for each in workers] == ["p0", "p1", "p0", "p1"]
    assert [each.decode_worker for each in workers] == ["d0", "d1", "d0", "d1"]
    workers[1].end_prefill()
    assert cluster.place().prefill_worker == "p1"


def test_a_full_decode_worker_is_passed_over() -> None:
    cluster = Cluster("1e1p2d")
    cluster.workers["d0"].room["reserve"] = 0
    assert cluster.place().decode_worker == "d1"
    assert cluster.asked == ["reserve d0", "reserve d1", "submit p0"]
    assert cluster.router.in_flight("d0") == InFlight()


def test_a_prompt_that_is_refused_gives_its_room_back_and_goes_to_the_next_worker() -> None:
    """A decode worker that has refused is not asked again; one that had room is."""
    cluster = Cluster("1e2p2d")
    cluster.workers["d0"].room["reserve"] = cluster.workers["p0"].room["submit"] = 0
    assert cluster.place().prefill_worker == "p1"
    assert cluster.asked == [
        "reserve d0", "reserve d1", "submit p0", "release d1",
        "reserve d1", "submit p1",
    ]  # fmt: skip
    assert cluster.router.in_flight("p0") == InFlight()


def test_what_was_refused_does_not_count_in_the_order_of_the_next_question() -> None:
    cluster = Cluster("1e2p2d")
    cluster.workers["p0"].room["submit"] = 0
    cluster.place()
    assert cluster.asked == ["reserve d0", "submit p0", "release d0", "reserve d0", "submit p1"]


def test_without_room_anywhere_nothing_is_left_behind() -> None:
    cluster = Cluster("1e2p2d")
    for name in ("d0", "d1"):
        cluster.workers[name].room["reserve"] = 0
    cluster.place(is_placed=False)
    assert cluster.asked == ["reserve d0", "reserve d1"]
    assert all(cluster.router.in_flight(name) == InFlight() for name in cluster.workers)


def test_when_decode_workers_are_full_a_merged_worker_takes_it() -> None:
    cluster = Cluster("1e1p1pd1d")
    cluster.workers["d0"].room["reserve"] = 0
    cluster.router.add("pd0", num_decodes=3)
    assert cluster.place().prefill_worker == "pd0"
    assert cluster.asked == ["reserve d0", "submit pd0"]


def test_a_driver_that_stops_in_the_middle_leaves_nothing_counted() -> None:
    """As the server does when a worker is lost: the loss is counted before others are asked."""
    cluster = Cluster("1e1p1d")
    placement = Placement(cluster.router, TOKENS)
    steps = cluster.policy.place(placement, ())
    assert next(steps) == "reserve"
    assert cluster.router.in_flight("d0").num_decodes == 1
    steps.close()
    assert cluster.router.in_flight("d0") == cluster.router.in_flight("p0") == InFlight()


def test_a_move_that_ends_after_the_request_counts_nothing() -> None:
    """A client has left while its answer was moved, or its prompt sent to another decode worker."""
    cluster = Cluster("1e1p2d")
    placement = cluster.place()
    placement.close()
    placement.move_decode("d1")
    placement.move_prefill("p0")
    assert cluster.router.in_flight("d1") == cluster.router.in_flight("p0") == InFlight()
    assert "d1" in placement.touched


def test_questions_follow_the_media_that_a_worker_has() -> None:
    cluster = Cluster("1e2p1d")
    cluster.router.add("p0", prefill_tokens=1)
    first = cluster.place(VIDEO)
    assert first.prefill_worker == "p1"
    first.end_prefill()
    cluster.router.add("p1", prefill_tokens=500)
    assert cluster.place(VIDEO).prefill_worker == "p1"
    assert cluster.place().prefill_worker == "p0"


def test_a_prefill_worker_that_has_enough_is_not_asked() -> None:
    cluster = Cluster("1e1p1d", max_prefills=2)
    cluster.place()
    second = cluster.place()
    cluster.place(is_placed=False)
    second.end_prefill()
    cluster.place()


def test_a_worker_that_does_not_answer_holds_up_two_requests_and_no_others() -> None:
    cluster = Cluster("1e2p1d")
    cluster.policy.asking["p0"] = 2
    assert cluster.place().prefill_worker == "p1"
    cluster.policy.asking["p0"] = 1
    assert cluster.place().prefill_worker == "p0"


def test_a_request_goes_only_where_it_is_allowed() -> None:
    cluster = Cluster("1e2p2d")
    placement = cluster.place(allowed=("p1", "d1"))
    assert (placement.prefill_worker, placement.decode_worker) == ("p1", "d1")
    cluster.place(allowed=("p1",), is_placed=False)


def test_a_prompt_that_nobody_else_would_decode_goes_where_it_is_decoded() -> None:
    """A suspect that asks one worker alone would ask a worker without a way on for ever (seed 53000)."""
    cluster = Cluster("2epd")
    cluster.workers["epd0"].roles = frozenset({"encode", "prefill"})
    placement = Placement(cluster.router, TOKENS)
    assert cluster._drive(cluster.policy.place(placement, (), lambda _, names: list(names[:1])), placement)
    assert cluster.asked == ["submit epd1"]
    cluster.workers["epd1"].is_closed = True
    assert not cluster.policy.can_ask()


def test_a_worker_that_changes_its_roles_takes_nothing_new() -> None:
    cluster = Cluster("1e2p1d")
    cluster.workers["p0"].is_closed = True
    assert [cluster.place().prefill_worker for _ in range(2)] == ["p1", "p1"]


def test_a_role_that_no_worker_has_is_waited_for_but_not_for_ever() -> None:
    cluster = Cluster("1e1p1d")
    assert cluster.policy.check_roles(0.0, 100.0, 60.0) == 100.0
    cluster.workers["d0"].is_closed = True
    assert cluster.policy.check_roles(100.0, 150.0, 60.0) == 100.0
    with pytest.raises(UnavailableError, match="no worker for decode since 61 s"):
        cluster.policy.check_roles(100.0, 161.0, 60.0)


def test_a_role_that_comes_back_is_waited_for_anew() -> None:
    cluster = Cluster("1e1p1d")
    cluster.workers["p0"].is_closed = True
    assert cluster.policy.check_roles(0.0, 59.0, 60.0) == 0.0
    cluster.workers["p0"].is_closed = False
    assert (complete_s := cluster.policy.check_roles(0.0, 90.0, 60.0)) == 90.0
    cluster.workers["p0"].is_closed = True
    assert cluster.policy.check_roles(complete_s, 149.0, 60.0) == 90.0


def test_an_answer_that_moves_is_counted_where_it_is() -> None:
    cluster = Cluster("1e1p2d")
    placement = cluster.place()
    placement.end_prefill()
    assert not placement.end_prefill()
    placement.move_decode("d1")
    assert cluster.router.in_flight("d1") == InFlight(num_decodes=1)
    placement.release()
    assert all(cluster.router.in_flight(name) == InFlight() for name in cluster.workers)
    assert placement.touched == {"p0", "d0", "d1"}
