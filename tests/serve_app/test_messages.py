"""Ids of attempts and the split of reports: each owner gets what is its own."""

from __future__ import annotations

from epd.serve_app.messages import (
    Admitted,
    GroupsArrived,
    HandedOver,
    WorkerLoad,
    WorkerReport,
    attempt_id,
    by_owner,
    owner_of,
)
from epd.stages.engine.generation import TokenOutput
from epd.stages.sampling.sampler import SampledToken


def token(request_id: str, index: int) -> TokenOutput:
    return TokenOutput(request_id, 0, index, SampledToken(7, 0.0, ()), "a", None)


def test_an_id_names_its_owner_whatever_the_request_is_called() -> None:
    ids = [
        attempt_id(owner, request_id, 3) for owner in ("", "f0") for request_id in ("q1", "a/b", "/x", "#2/")
    ]
    assert [owner_of(each) for each in ids] == [""] * 4 + ["f0"] * 4
    assert len(set(ids)) == 8
    assert owner_of(f"{ids[-1]}/0/2") == "f0"  # a stream of frames


def test_a_report_is_split_by_owner_in_order() -> None:
    a, b, gone = (attempt_id(owner, "q", 1) for owner in ("a", "b", "gone"))
    arrived, load = GroupsArrived(("t1", "t2")), WorkerLoad(num_running=3)
    report = WorkerReport(
        "p0",
        (Admitted(a, 1), Admitted(gone, 1), arrived, HandedOver(a), HandedOver(b)),
        (token(b, 0), token(a, 0), token(gone, 0), token(a, 1)),
        load,
    )
    parts = by_owner(report, ["a", "b", "idle"])
    assert set(parts) == {"a", "b", "idle"}
    assert parts["a"].events == (Admitted(a, 1), arrived, HandedOver(a))
    assert parts["b"].events == (arrived, HandedOver(b))
    assert parts["idle"].events == (arrived,)
    assert [output.index for output in parts["a"].outputs] == [0, 1]
    assert [output.request_id for output in parts["b"].outputs] == [b]
    assert all((part.worker, part.load) == ("p0", load) for part in parts.values())
