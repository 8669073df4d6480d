"""Which worker is asked first."""

from __future__ import annotations

from epd.control.routing import InFlight, Router
from epd.encode.encoder_cache import GroupKey
from epd.topology import role_letters, topology_name

VIDEO = (("video", 1000),)


def key(name: str) -> GroupKey:
    return GroupKey(name, (0.5,), (0, 0), (56, 56), "model")


def test_prefill_goes_where_least_is_to_be_computed() -> None:
    router = Router()
    router.add("p0", prefill_tokens=500)
    assert list(router.prefill_order(["p0", "p1"])) == ["p1", "p0"]
    router.add("p1", prefill_tokens=600)
    assert list(router.prefill_order(["p0", "p1"])) == ["p0", "p1"]


def test_media_that_a_worker_has_draw_questions_to_it_unless_it_is_busy() -> None:
    router = Router()
    router.contents.remember_prefix("p1", VIDEO)
    assert list(router.prefill_order(["p0", "p1"], VIDEO)) == ["p1", "p0"]
    router.add("p1", prefill_tokens=900)
    assert list(router.prefill_order(["p0", "p1"], VIDEO)) == ["p1", "p0"]
    router.add("p1", prefill_tokens=200)
    assert list(router.prefill_order(["p0", "p1"], VIDEO)) == ["p0", "p1"]


def test_only_leading_media_are_a_prefix() -> None:
    router = Router()
    router.contents.remember_prefix("p1", (("a", 10), ("b", 1000)))
    assert next(router.prefill_order(["p0", "p1"], (("a", 10), ("c", 1000)))) == "p1"
    assert next(router.prefill_order(["p0", "p1"], (("b", 1000),))) == "p0"


def test_decode_goes_to_the_fewest_requests() -> None:
    router = Router()
    router.add("d0", num_decodes=2)
    router.add("d2", num_decodes=1)
    assert list(router.decode_order(["d0", "d1", "d2"])) == ["d1", "d2", "d0"]


def test_groups_go_to_the_least_outstanding_patches_or_to_who_has_them() -> None:
    router = Router()
    router.add("e0", encode_patches=10)
    assert router.encoder(["e1", "e0"]) == "e1"
    assert router.contents.encoder(["e0", "e1"], key("a")) is None
    router.contents.remember_group("e0", key("a"))
    assert router.contents.encoder(["e0", "e1"], key("a")) == "e0"
    assert router.contents.encoder(["e1"], key("a")) is None


def test_a_lost_worker_is_forgotten_with_what_it_had() -> None:
    router = Router()
    router.contents.remember_group("e0", key("a"))
    router.contents.remember_prefix("e0", VIDEO)
    router.forget("e0")
    assert router.contents.encoder(["e0"], key("a")) is None
    assert next(router.prefill_order(["a", "e0"], VIDEO)) == "a"


def test_what_is_remembered_is_bounded() -> None:
    router = Router(max_remembered=2)
    for name in "abc":
        router.contents.remember_group("e0", key(name))
    assert [router.contents.encoder(["e0"], key(name)) for name in "abc"] == [None, "e0", "e0"]


def test_topologies_are_named_in_the_order_of_the_stages() -> None:
    roles = [("decode",), ("encode",), ("encode",), ("prefill",), ("video",)]
    assert topology_name(roles) == "2e1p1d"
    assert topology_name([("encode", "prefill"), ("decode",)]) == "1ep1d"
    assert role_letters({"prefill", "encode", "decode"}) == "epd"


# Several routers over the same workers


def test_what_others_have_sent_counts_until_the_next_report() -> None:
    router = Router()
    router.add("p0", prefill_tokens=100, num_prefills=1)
    router.set_reported("p0", InFlight(prefill_tokens=600, num_prefills=3))
    assert router.load("p0") == InFlight(prefill_tokens=600, num_prefills=3)
    assert router.in_flight("p0") == InFlight(prefill_tokens=100, num_prefills=1)
    router.add("p1", prefill_tokens=300)
    assert next(router.prefill_order(["p0", "p1"])) == "p1"
    router.add("p0", prefill_tokens=50)
    assert router.load("p0").prefill_tokens == 650
    router.set_reported("p0", InFlight(prefill_tokens=120))  # not all that was sent has arrived
    assert router.load("p0") == router.in_flight("p0")
    assert next(router.prefill_order(["p0", "p1"])) == "p0"


def test_every_order_counts_others() -> None:
    router = Router()
    router.set_reported("a", InFlight(num_decodes=1, encode_patches=8, num_videos=1))
    assert list(router.decode_order(["a", "b"])) == ["b", "a"]
    assert router.encoder(["a", "b"]) == router.video(["a", "b"]) == "b"
    router.contents.remember_prefix("a", VIDEO)
    router.set_reported("a", InFlight(prefill_tokens=1001))
    assert next(router.prefill_order(["a", "b"], VIDEO)) == "b"


def test_others_are_forgotten_with_the_worker_or_when_there_are_none() -> None:
    router = Router()
    for worker in ("a", "b"):
        router.add(worker, num_decodes=1)
        router.set_reported(worker, InFlight(num_decodes=5))
    router.forget("a")
    assert [router.load(worker).num_decodes for worker in ("a", "b")] == [1, 5]
    assert list(router.decode_order(["a", "b"])) == ["a", "b"]
    router.clear_reported()
    assert router.load("b") == router.in_flight("b") == InFlight(num_decodes=1)
