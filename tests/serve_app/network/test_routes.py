"""Which way data takes, by where both ends are and what memory they have."""

from __future__ import annotations

import pytest

from epd.serve_app.network.routes import PeerPlace, Route, choose_route

HERE = PeerPlace("p0 1", "here", ("GPU-a",))


@pytest.mark.parametrize(
    ("gpu", "there", "route"),
    [
        ("", HERE, Route.SAME_PROCESS),
        ("GPU-a", HERE, Route.SAME_PROCESS),
        ("", PeerPlace("d0 1", "here"), Route.SHARED_MEMORY),
        ("", PeerPlace("d0 1", "here", ("GPU-a",)), Route.SHARED_MEMORY),
        ("GPU-a", PeerPlace("d0 1", "here", ("GPU-b", "GPU-a")), Route.CUDA_IPC),
        ("GPU-a", PeerPlace("d0 1", "here", ("GPU-b",)), Route.STAGING),
        ("GPU-a", PeerPlace("d0 1", "here"), Route.STAGING),
        ("", PeerPlace("d0 1", "there"), Route.LINK),
        ("GPU-a", PeerPlace("d0 1", "there", ("GPU-a",)), Route.LINK),
        ("GPU-a", None, Route.LINK),
    ],
)
def test_the_route_follows_place_and_memory(gpu: str, there: PeerPlace | None, route: Route) -> None:
    assert choose_route(gpu, HERE, there) is route


def test_nixl_takes_the_place_of_the_link_where_it_works() -> None:
    there = PeerPlace("d0 1", "there")
    assert choose_route("", HERE, there, between_machines=Route.NIXL) is Route.NIXL
    assert choose_route("", HERE, there, between_machines=Route.NIXL, may_open=False) is Route.LINK
    assert choose_route("", HERE, None, between_machines=Route.NIXL) is Route.LINK
    neighbour = PeerPlace("d0 1", "here")
    assert choose_route("", HERE, neighbour, between_machines=Route.NIXL) is Route.SHARED_MEMORY


def test_what_could_not_be_opened_is_staged() -> None:
    there = PeerPlace("d0 1", "here", ("GPU-a",))
    assert choose_route("GPU-a", HERE, there, may_open=False) is Route.STAGING


@pytest.mark.parametrize("gpu", ["", "GPU-a"])
def test_everything_of_a_machine_can_be_staged(gpu: str) -> None:
    assert choose_route(gpu, HERE, PeerPlace("d0 1", "here", ("GPU-a",)), is_staged=True) is Route.STAGING
    assert choose_route(gpu, HERE, PeerPlace("d0 1", "there"), is_staged=True) is Route.LINK
