"""Work of a CPU is done at once; a device's work only when its event has been passed."""

from __future__ import annotations

import pytest
import torch

from epd.stages.connectors.mailbox import DONE, recorded


class FakeEvent:
    is_passed = False

    def query(self) -> bool:
        return self.is_passed


class FakeStream:
    def __init__(self) -> None:
        self.events: list[FakeEvent] = []

    def record_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


def test_work_of_a_cpu_is_done() -> None:
    assert recorded(torch.device("cpu")) is DONE
    assert DONE.is_done()


def test_a_devices_work_is_done_when_its_event_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)  # noqa: ARG005
    first, second = recorded(torch.device("cuda")), recorded(torch.device("cuda"))
    assert not first.is_done()
    stream.events[0].is_passed = True
    assert first.is_done()
    assert not second.is_done()
