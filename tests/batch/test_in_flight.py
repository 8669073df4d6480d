"""The media and lines that are asked about at once fill the passes of each worker."""

from __future__ import annotations

import pytest

from epd.batch.http_backend import HttpBackend
from epd.batch.in_flight import lines_at_once, media_at_once
from tests.batch.test_http_backend import KEY, FakeServer, serving


@pytest.mark.parametrize(("lines_per_medium", "num_media"), [(1, 64), (5, 13), (100, 4)])
def test_media_with_few_lines_are_asked_about_together(lines_per_medium: int, num_media: int) -> None:
    assert media_at_once(64, lines_per_medium) == num_media
    with (
        serving(FakeServer(workers=[{"roles": "epd"}] * 2)) as server,
        HttpBackend.open(server.url, KEY, lines_per_medium=lines_per_medium) as backend,
    ):
        assert (backend.in_flight.media, backend.in_flight.lines) == (2 * num_media, 128)


def test_a_server_of_many_workers_gets_no_more_lines_than_it_lets_wait() -> None:
    """But a few for each worker."""
    assert [lines_at_once(number) * number for number in (1, 4, 8, 12, 16, 100)] == [
        64,
        256,
        256,
        252,
        256,
        1600,
    ]
