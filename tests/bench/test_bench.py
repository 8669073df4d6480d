"""Rounds against servers of known delays: measured right, sent on time, in turns, fresh.

Modules: `epd/bench/media.py`, `epd/bench/report.py`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from epd.bench.bench import BenchPlan, BenchResult, Prepared, run_bench, run_load
from epd.bench.client import ChatReply
from epd.bench.media import MediaLibrary
from epd.client.body import Body
from epd.client.endpoint import Endpoint
from epd.errors import RequestError
from epd.serve_app.cli.program import app
from epd.workload.arrivals import ArrivalTimes, ClosedArrivals, ConstantArrivals, TraceArrivals
from epd.workload.distributions import SizeDistribution
from epd.workload.metrics import SLO
from epd.workload.requests import Mix, Resolution, ShapeClass, Workload
from tests.bench.conftest import VirtualTime
from tests.bench.fake_server import FakeServer, Manner
from tests.bench.test_client import NEVER_S

SMALL = ShapeClass(
    output_tokens=SizeDistribution.of(5), images=SizeDistribution.of(1), image_size=(Resolution(32, 32),)
)
TEXT = ShapeClass(output_tokens=SizeDistribution.of(5))


def plan(
    *servers: FakeServer, arrivals: ArrivalTimes, num: int, shape: ShapeClass = TEXT, **more: Any
) -> BenchPlan:
    endpoints = tuple(Endpoint(f"s{place}", server.url, "fake") for place, server in enumerate(servers))
    workload = Workload("test", arrivals, Mix((shape,)), num_requests=num)
    return BenchPlan(workload, endpoints, **{"warmup": 0, "timeout_s": NEVER_S, **more})


def run(todo: BenchPlan, library: MediaLibrary) -> BenchResult:
    library.draw(todo.all_requests(), lambda *_: None)
    return asyncio.run(run_bench(todo, library))


def measured(virtual: VirtualTime, todo: BenchPlan, library: MediaLibrary) -> BenchResult:
    """The same in virtual time."""
    library.draw(todo.all_requests(), lambda *_: None)
    return virtual.run(run_bench(todo, library))


def test_figures_are_those_of_the_server(virtual: VirtualTime, library: MediaLibrary) -> None:
    server = virtual.server(ttft_s=0.5, gap_s=0.25)
    report = measured(virtual, plan(server, arrivals=ConstantArrivals(10.0), num=10), library).pooled(0)
    assert report.num_ok == 10
    assert report.ttft is not None
    assert report.tpot is not None
    assert report.itl is not None
    assert report.e2e is not None
    assert report.ttft.p50_s == pytest.approx(0.5)
    assert report.tpot.p50_s == pytest.approx(0.25)
    assert report.itl.p50_s == pytest.approx(0.25)
    assert report.e2e.p50_s == pytest.approx(1.5)
    # The last is sent at 0.9 s.
    assert report.duration_s == pytest.approx(2.4)
    assert report.completion_tokens == 50


class SleepyClient:
    """Answers after a second. No network: what is measured is the generator alone."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def ask(self, _body: Body, /) -> ChatReply:
        reply = ChatReply(self.now_s())
        await asyncio.sleep(1.0)
        reply.token_times_s.append(self.now_s())
        reply.end_s = self.now_s()
        return reply


def prepared(num: int, gap_s: float) -> list[Prepared]:
    return [Prepared(index, index * gap_s, Body((b"{}",))) for index in range(num)]


def test_a_slow_server_delays_nothing(virtual: VirtualTime) -> None:
    """40 requests are due within 0.4 s, long before the first answer."""
    records = virtual.run(run_load(SleepyClient(), prepared(40, 0.01), max_in_flight=100))
    assert [record.sent_s for record in records] == pytest.approx([0.01 * each for each in range(40)])
    assert [record.lateness_s for record in records] == pytest.approx([0.0] * 40)
    assert not any(record.waited_for_place for record in records)


def test_the_bound_holds_and_is_told(virtual: VirtualTime) -> None:
    """Three places for six requests: the second three wait for the answers to the first, and say so."""
    records = virtual.run(run_load(SleepyClient(), prepared(6, 0.01), max_in_flight=3))
    assert [record.waited_for_place for record in records] == [False] * 3 + [True] * 3
    assert [record.lateness_s for record in records[3:]] == pytest.approx([0.97] * 3)
    assert [record.ttft_s for record in records] == pytest.approx([1.0] * 6), "not from when they were due"


def test_a_closed_loop_keeps_its_number_in_flight(virtual: VirtualTime) -> None:
    records = virtual.run(run_load(SleepyClient(), prepared(6, 0.0), max_in_flight=2, is_open_loop=False))
    for record in records:
        together = sum(other.sent_s <= record.sent_s < other.end_s for other in records)
        assert together <= 2
    assert records[-1].end_s == pytest.approx(3.0)
    assert {record.lateness_s for record in records} == {0.0}


def test_a_late_run_says_so(server: FakeServer, library: MediaLibrary) -> None:
    todo = plan(server, arrivals=TraceArrivals((0.0,) * 8), num=8, max_in_flight=1)
    report = run(todo, library).pooled(0)
    assert report.is_late
    assert report.num_waited == 7


def test_failures_are_counted_by_kind(server: FakeServer, library: MediaLibrary) -> None:
    server.behave(status=429)
    report = run(plan(server, arrivals=ConstantArrivals(50.0), num=5, slo=SLO(ttft_s=1.0)), library).pooled(0)
    assert report.errors == {"HTTP 429": 5}
    assert (report.num_ok, report.ttft, report.slo_attainment) == (0, None, 0.0)


def test_endpoints_take_turns_and_get_the_same(virtual: VirtualTime, library: MediaLibrary) -> None:
    server, other = virtual.server(), virtual.server(ttft_s=0.5)
    todo = plan(server, other, arrivals=ConstantArrivals(50.0), num=3, shape=SMALL, rounds=2, warmup=1)
    result = measured(virtual, todo, library)
    assert [(one.round_index, one.place) for one in result.runs] == [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert sorted(map(str, server.bodies)) == sorted(map(str, other.bodies))
    # A warm-up and twice three, each with an image and a question of its own.
    assert len({str(body) for body in server.bodies}) == 7
    images = {body["messages"][0]["content"][0]["image_url"]["url"] for body in server.bodies}
    assert len(images) == 7
    found = {ratio.figure: ratio for ratio in result.ratios()}
    assert found["TTFT p50"].median == pytest.approx(0.5 / 0.05)
    assert found["TTFT p50"].num_rounds == 2


def test_kinds_of_requests_are_told_apart(virtual: VirtualTime, library: MediaLibrary) -> None:
    """One of two answers an image after half a second, and a text at once; the other both at once."""
    server, other = virtual.server(media_ttft_s=0.45), virtual.server()
    todo = plan(server, other, arrivals=ConstantArrivals(20.0), num=12, rounds=2)
    todo = replace(todo, workload=replace(todo.workload, shapes=Mix((SMALL, TEXT))))
    result = measured(virtual, todo, library)
    assert result.kinds() == ("image", "text")
    images, texts = (result.pooled(0, kind) for kind in result.kinds())
    assert images.num_requests + texts.num_requests == 24
    assert images.ttft is not None
    assert texts.ttft is not None
    assert images.ttft.p50_s == pytest.approx(0.5)
    assert texts.ttft.p50_s == pytest.approx(0.05)
    of_images, of_texts = ({ratio.figure: ratio for ratio in result.ratios(kind)} for kind in result.kinds())
    assert of_images["TTFT p50"].median == pytest.approx(0.1)
    assert of_texts["TTFT p50"].median == pytest.approx(1.0)


def test_requests_that_are_alike_have_no_kinds(server: FakeServer, library: MediaLibrary) -> None:
    assert run(plan(server, arrivals=ConstantArrivals(50.0), num=3), library).kinds() == ()


def test_one_server_under_two_names_gets_nothing_twice(server: FakeServer, library: MediaLibrary) -> None:
    todo = plan(server, server, arrivals=ClosedArrivals(), num=3, shape=SMALL, max_in_flight=1)
    run(todo, library)
    assert len({str(body) for body in server.bodies}) == 6


def test_repeats_send_the_same_medium_again(server: FakeServer, library: MediaLibrary) -> None:
    workload = Workload("again", ClosedArrivals(), Mix((SMALL,)), num_requests=5, repeat_rate=1.0)
    run(BenchPlan(workload, (Endpoint("it", server.url, "fake"),), warmup=0, max_in_flight=1), library)
    contents = [body["messages"][0]["content"] for body in server.bodies]
    assert len({content[0]["image_url"]["url"] for content in contents}) == 1
    assert len({content[1]["text"] for content in contents}) == 5


def test_a_server_gets_the_answers_length_under_the_name_it_wants(
    server: FakeServer, library: MediaLibrary
) -> None:
    """As servers of OpenAI's newer models refuse the old name."""
    server.behave(wants_new_limit=True)
    with FakeServer() as other:
        todo = plan(server, other, arrivals=ConstantArrivals(50.0), num=2, warmup=1, rounds=2)
        result = run(todo, library)
        assert result.pooled(0).num_ok == result.pooled(1).num_ok == 4
        assert [sorted({"max_tokens", "max_completion_tokens"} & body.keys()) for body in server.bodies] == [
            ["max_tokens"],
            *[["max_completion_tokens"]] * 5,
        ]
        assert all("max_completion_tokens" not in body for body in other.bodies)
    server.bodies.clear()
    todo = plan(server, arrivals=ConstantArrivals(50.0), num=2, limit_field="max_completion_tokens")
    assert run(todo, library).pooled(0).num_ok == 2
    assert all("max_tokens" not in body for body in server.bodies)


def test_a_warm_up_that_fails_ends_the_run(server: FakeServer, library: MediaLibrary) -> None:
    server.behave(status=500)
    with pytest.raises(RequestError, match=r"none of 2 warm-up requests: HTTP 500: .*no room"):
        run(plan(server, arrivals=ConstantArrivals(50.0), num=3, warmup=2), library)


def test_media_are_drawn_once(library: MediaLibrary) -> None:
    shape = ShapeClass(
        images=SizeDistribution.of(2), videos=SizeDistribution.of(1), video_s=SizeDistribution.of(2)
    )
    workload = Workload("media", ClosedArrivals(), Mix((shape,)), num_requests=3, repeat_rate=0.3)
    requests = list(workload.requests(5))
    shown: list[tuple[int, int]] = []
    num_new = sum(request.repeat_of is None for request in requests)
    assert library.draw(requests, lambda *progress: shown.append(progress)) == 3 * num_new
    assert shown[-1] == ((2 + 48) * num_new,) * 2
    assert library.draw(requests, lambda *_: None) == 0
    parts = library.load(requests)
    assert len({part.base64 for part in parts.values()}) == 3 * num_new


# The command.


def epd_bench(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_the_command_prints_tables_and_writes_files(server: FakeServer, tmp_path: Path) -> None:
    with FakeServer(Manner(ttft_s=0.1)) as other:
        result = epd_bench(
            *("--url", f"quick={server.url}", "--url", f"slow={other.url}", "--workload", "mixed"),
            *("--rate", 40, "--num-requests", 12, "--video-seconds", 1, "--video-size", "64x64"),
            *("--max-tokens", 4, "--slo-ttft-s", 0.09, "--rounds", 2, "--api-key", "secret-2", "--seed", 4),
            *("--json", tmp_path / "out.json", "--plot", tmp_path / "out.png"),
        )
    assert result.exit_code == 0, result.output
    for word in (
        "quick",
        "slow",
        "TTFT",
        "TPOT",
        "ITL",
        "E2E",
        "p99",
        "SLO met",
        "slow / quick",
        "quick, video",
        "ratio, text",
        "open loop, 2 rounds",
    ):
        assert word in result.stdout
    text = (tmp_path / "out.json").read_text()
    record = json.loads(text)
    assert "secret-2" not in text + result.output
    assert record["endpoints"]["quick"]["pooled"]["num_ok"] == 24
    assert record["endpoints"]["slow"]["pooled"]["slo_attainment"] == 0.0
    assert len(record["requests"]) == 48
    assert sum(report["num_ok"] for report in record["endpoints"]["quick"]["kinds"].values()) == 24
    assert {kind for kind, found in record["ratios_by_kind"].items() if found} == {"image", "text", "video"}
    assert {ratio["name"] for ratio in record["ratios"]} == {"slow"}
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    contents = [body["messages"][0]["content"] for body in server.bodies]
    kinds = {part["type"] for content in contents if isinstance(content, list) for part in content}
    assert kinds == {"text", "image_url", "video_url"}
    sent = str(server.bodies)
    assert "data:image/jpeg;base64,/9j/" in sent, "the first bytes of a JPEG"
    assert "data:video/mp4;base64,AAAA" in sent, "the length of an MP4's first box"


def test_a_table_in_a_file_is_whole(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers of one machine differ in the port alone, which a narrow table cuts off."""
    monkeypatch.setenv("COLUMNS", "60")
    load = ("--concurrency", 2, "--num-requests", 4)
    with FakeServer() as other:
        result = epd_bench("--url", server.url, "--url", other.url, *load)
    assert result.exit_code == 0, result.output
    totals = result.stdout.partition("errors")[2]
    for each in (server, other):
        assert each.url.removeprefix("http://") in totals
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.stdout


def test_json_alone_on_stdout(server: FakeServer) -> None:
    load = ("--concurrency", 4, "--num-requests", 8)
    result = epd_bench("--url", server.url, *load, "--ignore-eos", "--json", "-")
    record = json.loads(result.stdout)
    (endpoint,) = record["endpoints"].values()
    assert (endpoint["model"], endpoint["pooled"]["lateness"]) == ("fake", None)
    assert all(body["ignore_eos"] is True for body in server.bodies)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workload", "nope"), "neither a preset"),
        (("--rate", "0"), "rate is 0"),
        (("--rounds", "0"), "rounds is 0"),
        (("--plot", "x.txt"), ".png"),
        (("--json", "/no/such/folder/x.json"), "folder that exists"),
        (("--extra-body", "[1]"), "JSON object"),
        (("--slo-tpot-s", "-1"), "tpot_s is -1"),
        (("--max-tokens", "many"), "not a size distribution"),
        (("--image-size", "12"), "WIDTHxHEIGHT"),
    ],
)
def test_what_makes_no_sense_gives_one_line_and_sends_nothing(
    server: FakeServer, arguments: tuple[str, str], words: str
) -> None:
    result = epd_bench("--url", server.url, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert server.bodies == []
