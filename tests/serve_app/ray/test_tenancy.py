"""Where an application goes on a cluster of others, and whose an application is; without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from epd.errors import (
    EPDError,
    InfeasibleError,
    ModelNotFoundError,
    RequestError,
    UnavailableError,
    exit_code,
)
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.ray import gpus
from epd.serve_app.ray.cluster import reason_of
from epd.serve_app.ray.server import check_room, start_error
from epd.serve_app.ray.tenancy import (
    Cluster,
    Place,
    Tenant,
    checked_name,
    cluster_of,
    free_place,
    is_left,
    is_of,
    url_at,
)

HTTP = HttpAddress("127.0.0.1", 8000)
OURS = Tenant("epd", "RUNNING", "/")
SHARED = Cluster([OURS, Tenant("shop", "DEPLOY_FAILED", "/shop")], HTTP, has_serve=True)


def test_the_first_application_is_behind_the_proxy() -> None:
    assert free_place(Cluster(), "epd", HTTP) == Place("/")
    assert free_place(Cluster((), HTTP, has_serve=True), "epd", HTTP) == Place("/")


@pytest.mark.parametrize(
    ("name", "http", "place"),
    [
        ("two", HttpAddress(prefix="/two"), Place("/two")),
        # Another port is none of the proxy's: fronts listen there, and take no route from others.
        ("two", HttpAddress(port=9000), Place(None, HttpAddress(port=9000))),
        ("two", HttpAddress(port=9000, prefix="/two"), Place("/two", HttpAddress(port=9000, prefix="/two"))),
        ("two", HttpAddress("0.0.0.0"), Place(None, HttpAddress("0.0.0.0"))),
    ],
)
def test_a_second_application_goes_beside_the_first(name: str, http: HttpAddress, place: Place) -> None:
    assert free_place(SHARED, name, http) == place


@pytest.mark.parametrize(
    ("name", "http", "words"),
    [
        ("epd", HTTP, r"application 'epd' \(RUNNING\), which is left as it is; give this one another --name"),
        ("epd", HttpAddress(port=9000, prefix="/two"), "application 'epd'"),
        ("shop", HttpAddress(port=9000), r"application 'shop' \(DEPLOY_FAILED\)"),
        ("two", HTTP, "route '/' .* application 'epd', .* another --route-prefix, such as /two"),
        ("two", HttpAddress(prefix="/shop"), "route '/shop' .* application 'shop'"),
        ("two", HttpAddress(port=9000, prefix="/shop"), "route '/shop' .* application 'shop'"),
    ],
)
def test_what_is_taken_is_told_in_one_line(name: str, http: HttpAddress, words: str) -> None:
    with pytest.raises(UnavailableError, match=words) as raised:
        free_place(SHARED, name, http)
    assert exit_code(raised.value) == 3
    assert "\n" not in str(raised.value)


def test_a_serve_without_a_proxy_leaves_the_port_to_fronts() -> None:
    there = Cluster([OURS], None, has_serve=True)
    assert free_place(there, "two", HTTP) == Place(None, HTTP)


@pytest.mark.parametrize("name", ["", "a/b", "a#b", "ä", "-a", "a b", "a" * 64])
def test_a_name_that_serve_would_stumble_over_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="change --name"):
        checked_name(name)
    assert checked_name("team-a.vl_2") == "team-a.vl_2"


def details(user_config: Any, name: str = "two") -> dict[str, Any]:
    front = {"deployment_config": {"user_config": user_config}}
    application = {"status": "RUNNING", "route_prefix": "/two", "deployments": {"Front": front}}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "0.0.0.0", "port": 8080},
        "applications": {name: application, "other": {"status": "DELETING", "route_prefix": None}},
    }


def test_what_serve_says_of_an_instance_is_read() -> None:
    there = cluster_of(details({"owner": "me"}))
    assert there.proxy == HttpAddress("0.0.0.0", 8080)
    assert url_at(there, "two", "10.0.0.5") == "http://10.0.0.5:8080/two"
    assert url_at(there, "other", "10.0.0.5") is None
    assert url_at(there, "none", "10.0.0.5") is None
    there = cluster_of(details({"host": "127.0.0.1", "port": 9000, "owner": "me"}))
    assert url_at(there, "two", "10.0.0.5") == "http://127.0.0.1:9000"


@pytest.mark.parametrize("user_config", [None, {}, 7, ["a"], {"port": "x"}, {"x": 0.5}, {"owner": "you"}])
def test_only_its_own_application_is_the_commands(user_config: Any) -> None:
    """Whatever others give a deployment that is called Front too."""
    assert not is_of(cluster_of(details(user_config)), "two", "me")
    assert is_of(cluster_of(details({"owner": "me"})), "two", "me")
    assert not is_of(cluster_of(details({"owner": "me"}, name="one")), "two", "me")


WAITING = (
    "Deployment '{}' in application 'epd' has 1 replicas that have taken more than 30s to be scheduled. This "
    "may be due to waiting for the cluster to auto-scale or for a runtime environment to be installed. "
    "Resources required for each replica: {}, total resources available: {}. "
    "Use `ray status` for more details."
)


def test_a_replica_without_room_says_what_it_asks_for_and_what_there_is() -> None:
    message = WAITING.format("Stage", '{"CPU": 2.0, "GPU": 1.0}', '{"CPU": 8.0, "GPU": 0.5}')
    with pytest.raises(InfeasibleError, match=r"of Stage that asks for 1 GPU; the cluster has 0\.5 GPU free"):
        check_room(["", message])


@pytest.mark.parametrize("amounts", [("{}", "{}"), ("UNKNOWN", "UNKNOWN"), ('{"CPU": 1.0}', '{"CPU": 1.0}')])
def test_a_replica_that_is_slow_to_start_is_waited_for(amounts: tuple[str, str]) -> None:
    check_room([WAITING.format("Media", *amounts), "Deployment 'Media' is updating."])


def test_gpus_that_others_have_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "cluster_gpus", lambda: 4.0)
    monkeypatch.setattr(gpus, "free_gpus", lambda _all: 1.0)
    words = "3 stage workers of 1 GPUs each; the cluster has 4 GPUs, of which others leave 1 free"
    with pytest.raises(InfeasibleError, match=words):
        gpus.with_gpus(AppArgs(device="cuda"))
    assert gpus.with_gpus(AppArgs()).gpus_per_worker == 0.33


def test_rays_reason_is_one_line_without_colours() -> None:
    error = RuntimeError("\x1b[31mVersion mismatch:\x1b[0m The cluster was started with:\n    Ray: 2.1\n")
    assert reason_of(error) == "Version mismatch: The cluster was started with: Ray: 2.1"
    error = ConnectionError("Failed to connect")
    error.__cause__ = RuntimeError("no node")
    assert reason_of(error) == "Failed to connect: no node"
    assert reason_of(KeyError()) == "KeyError"
    assert len(reason_of(RuntimeError("x" * 10_000))) < 500


def test_the_error_of_a_replica_is_the_commands() -> None:
    trace = (
        "Traceback (most recent call last):\n  File x\nepd.errors.ModelNotFoundError: no weights; add them\n"
    )
    found: EPDError = start_error(["", trace], "Deployment failed")
    assert isinstance(found, ModelNotFoundError)
    assert str(found) == "no weights; add them"
    other = start_error([trace.replace("epd.errors.ModelNotFoundError", "OSError")], "Deployment failed")
    assert "does not start: OSError: no weights; add them" in str(other)
    assert "\x1b" not in str(start_error([], "\x1b[31mfailed\x1b[0m"))


def test_an_application_that_ends_is_left_until_it_is_gone_or_replaced() -> None:
    tenants = [Tenant("ends", "DELETING", None), Tenant("ours", "RUNNING", "/", owner="me")]
    there = Cluster([*tenants, Tenant("theirs", "RUNNING", "/b", owner="they")], HTTP, has_serve=True)
    left = {name: is_left(there, name, "me") for name in ("ends", "ours", "theirs", "none")}
    assert left == {"ends": True, "ours": True, "theirs": False, "none": False}
