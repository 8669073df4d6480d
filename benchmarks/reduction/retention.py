"""Retention by load against fixed retentions, in the live app: the same ramps of questions to one server.

    python -m benchmarks.reduction.retention [--quick] [--slo SECONDS]

One worker for all stages serves the embedded model. 28 videos of 256 frames are popular: their embeddings are
in the encoder cache from a warm-up, their keys and values are not, since there is room for two whole prompts
only and the videos take turns. So what a question costs is its prefill, which is what retention shortens:
decoding and encoding of a fresh video take as long as prefill, and no retention makes them shorter.
Questions are of the two kinds whose answers need many tokens: what is seen at a time, and how many there are.
A ramp has a calm, a rise, a peak, a fall and a calm; its rates come from a calibration: the peak takes
0.75 of what the least retention can do. It lasts several SLOs: what is too slow for it cannot hide that in
its queue. Each round has new arrivals and questions, the same for all settings, which follow one another on
the same server. Fixed ones are asked for by the requests.
A first token later than the SLO, and a refusal (429), miss it. The SLO must be several times what a question
with all tokens takes. Results go to benchmarks/results/retention.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.reporting import Row, Section, run_sections, setting
from benchmarks.serving.serve import Server, serving
from epd.eval.plan import HELD_OUT_SEED
from epd.shapes import Question, QuestionKind, Scene, make_questions, make_scene
from epd.video.demo_video import write_demo_video

FRAMES, NUM_VIDEOS = 256, 28
KINDS = (QuestionKind.TIME, QuestionKind.COUNT)
KV_TOKENS = 4608
LEAST = 0.1
SETTINGS: tuple[float | None, ...] = (None, 1.0, 0.5, 0.25, 0.15, LEAST)  # None: by load
CACHE = Path(tempfile.gettempdir()) / "epd-bench-retention"
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Film:
    path: Path
    scene: Scene


@dataclass(frozen=True, slots=True)
class Asked:
    """due_s: from the start of the ramp."""

    due_s: float
    film: Film
    question: Question


@dataclass(frozen=True, slots=True)
class Outcome:
    """ttft_s: as the server measured it, from arrival; None if it was refused."""

    is_right: bool = False
    ttft_s: float | None = None
    retention: float | None = None
    tokens: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Ramp:
    """Rates per second; seconds of calm, rise, peak, fall and calm."""

    base: float
    peak: float
    seconds: tuple[float, float, float, float, float]

    def rate_at(self, now_s: float) -> float:
        calm, rise, peak, fall, _ = self.seconds
        if calm <= now_s < calm + rise:
            return self.base + (self.peak - self.base) * (now_s - calm) / rise
        if calm + rise <= now_s < calm + rise + peak:
            return self.peak
        left = calm + rise + peak + fall - now_s
        return self.base + (self.peak - self.base) * left / fall if 0 < left <= fall else self.base

    def arrivals_s(self, rng: random.Random) -> list[float]:
        """A Poisson process of that rate, thinned out of one of the highest."""
        times, now_s = [], rng.expovariate(self.peak)
        while now_s < sum(self.seconds):
            if rng.random() * self.peak < self.rate_at(now_s):
                times.append(now_s)
            now_s += rng.expovariate(self.peak)
        return times


def films() -> list[Film]:
    CACHE.mkdir(parents=True, exist_ok=True)
    found = []
    for number in range(NUM_VIDEOS):
        seed = HELD_OUT_SEED + 77_000 + number
        film = Film(CACHE / f"{FRAMES}-{seed}.mp4", make_scene(seed, float(FRAMES)))
        if not film.path.exists():
            write_demo_video(film.path, film.scene, fps=2, height=144, width=256)
        found.append(film)
    return found


def plan(ramp: Ramp, known: Sequence[Film], seed: int) -> list[Asked]:
    """Videos take turns in an order of the seed, so that nobody asks twice before all were asked about."""
    rng = random.Random(seed)
    order = rng.sample(known, len(known))
    asked = []
    for number, due_s in enumerate(ramp.arrivals_s(rng)):
        film, kind = order[number % len(order)], KINDS[rng.randrange(len(KINDS))]
        drawn = make_questions(film.scene, rng, 4, time_margin_s=2.0)
        asked.append(Asked(due_s, film, rng.choice([each for each in drawn if each.kind == kind])))
    return asked


class Client:
    """Asks one server."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=1000)
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, film: Film, question: Question, retention: float | None) -> Outcome:
        content = [
            {"type": "video_url", "video_url": {"url": film.path.as_uri()}},
            {"type": "text", "text": question.text},
        ]
        options: dict[str, Any] = {"num_frames": FRAMES}
        if retention is not None:
            options["retention"] = retention
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "epd": options}
        answer = await self._http.post("/v1/chat/completions", json=body)
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            return Outcome()
        answer.raise_for_status()
        said = answer.json()
        report, text = said["epd"], said["choices"][0]["message"]["content"]
        is_right = question.is_answered_by(text)
        tokens = said["usage"]["prompt_tokens"]
        return Outcome(is_right, report["ttft_s"], report["retention"], tokens, report["cached_tokens"])

    async def status(self) -> Row:
        answer = await self._http.get("/v1/epd/status")
        report: Row = answer.json()
        return report

    async def warm_up(self, known: Sequence[Film]) -> None:
        """Everything is encoded once."""
        for film in known:
            await self.ask(film, make_questions(film.scene, random.Random(0))[0], LEAST)

    async def seconds_each(self, known: Sequence[Film], retention: float, num: int) -> float:
        """Of questions one after the other, two at the server at a time."""
        left = iter([known[number % len(known)] for number in range(num)])

        async def work() -> None:
            for film in left:
                await self.ask(film, make_questions(film.scene, random.Random(1))[0], retention)

        start = time.perf_counter()
        await asyncio.gather(work(), work())
        return (time.perf_counter() - start) / num

    async def run(self, asked: Sequence[Asked], retention: float | None) -> list[Outcome]:
        start = time.perf_counter()

        async def one(each: Asked) -> Outcome:
            await asyncio.sleep(max(0.0, start + each.due_s - time.perf_counter()))
            return await self.ask(each.film, each.question, retention)

        return list(await asyncio.gather(*(one(each) for each in asked)))

    async def rest(self) -> None:
        """Until nothing is left and the level is back at 1."""
        end = time.perf_counter() + 60
        while time.perf_counter() < end:
            status = await self.status()
            if status["num_requests"] == 0 and status["retention"]["level"] == 1.0:
                return
            await asyncio.sleep(0.5)


def most_changes(changes: Sequence[Row]) -> int:
    times = [each["at_s"] for each in changes]
    return max((sum(start <= each <= start + _WINDOW_S for each in times) for start in times), default=0)


def row(name: str, outcomes: Sequence[Outcome], changes: Sequence[Row], slo_s: float) -> Row:
    answered = [each for each in outcomes if each.ttft_s is not None]
    ttfts = sorted(each.ttft_s for each in answered if each.ttft_s is not None)
    in_time = [each for each in answered if each.ttft_s is not None and each.ttft_s <= slo_s]
    return {
        "retention": name,
        "questions": len(outcomes),
        "refused": len(outcomes) - len(answered),
        "slo_attainment": round(len(in_time) / len(outcomes), 4),
        "accuracy": round(sum(each.is_right for each in answered) / len(answered), 4),
        "right_in_time": round(sum(each.is_right for each in in_time) / len(outcomes), 4),
        "mean_retention": round(statistics.mean(each.retention or 0.0 for each in answered), 3),
        "ttft_p50_s": round(ttfts[len(ttfts) // 2], 2),
        "ttft_p99_s": round(ttfts[int(len(ttfts) * 0.99)], 2),
        "cached_share": round(sum(o.cached for o in answered) / sum(o.tokens for o in answered), 3),
        "level_changes": len(changes),
        "most_in_a_minute": most_changes(changes),
    }


async def measure(
    server: Server, num_rounds: int, seconds: tuple[float, float, float, float, float], slo_s: float
) -> Row:
    client, known = Client(server.url), films()
    try:
        await client.warm_up(known)
        full_s = await client.seconds_each(known, 1.0, 12)
        least_s = await client.seconds_each(known, LEAST, 30)
        ramp = Ramp(0.5 / full_s, 0.75 / least_s, seconds)
        found: dict[float | None, list[Outcome]] = {each: [] for each in SETTINGS}
        changes: list[Row] = []
        rounds = []
        for number in range(num_rounds):
            asked = plan(ramp, known, number)
            order = SETTINGS if number % 2 == 0 else SETTINGS[::-1]
            for retention in order:
                await client.rest()
                start_s, load = time.time(), os.getloadavg()[0]
                outcomes = await client.run(asked, retention)
                found[retention] += outcomes
                if retention is None:
                    status = (await client.status())["retention"]
                    mine = [each for each in status["changes"] if each["at_s"] >= start_s]
                    changes += [{**each, "at_s": each["at_s"] - start_s, "round": number} for each in mine]
                name = "by load" if retention is None else str(retention)
                shown = row(name, outcomes, [], slo_s)
                rounds.append(
                    {
                        "round": number,
                        "retention": name,
                        "questions": len(outcomes),
                        "slo_attainment": shown["slo_attainment"],
                        "accuracy": shown["accuracy"],
                        "load_average_1min": round(load, 1),
                    }
                )
                print(rounds[-1], file=sys.stderr)
    finally:
        await client.close()
    summary = [
        row(
            "by load" if each is None else str(each),
            found[each],
            _of_rounds(changes) if each is None else [],
            slo_s,
        )
        for each in SETTINGS
    ]
    ramps = [
        {
            "full_s": round(full_s, 3),
            "least_s": round(least_s, 3),
            "base_per_s": round(ramp.base, 2),
            "peak_per_s": round(ramp.peak, 2),
            "seconds": "+".join(f"{each:g}" for each in seconds),
            "slo_s": slo_s,
            "kv_tokens": KV_TOKENS,
        }
    ]
    return {"summary": summary, "rounds": rounds, "ramp": ramps, "changes": changes}


def _of_rounds(changes: Sequence[Row]) -> list[Row]:
    """Rounds far apart on one clock."""
    return [{**each, "at_s": each["at_s"] + 1e6 * each["round"]} for each in changes]


def measured(quick: bool, slo_s: float) -> Row:
    options = ("--num-threads", "1", "--num-kv-tokens", str(KV_TOKENS), "--slo-ttft-s", str(slo_s))
    by_load = ("--retention-min", str(LEAST), "--allowed-media-path", str(CACHE))
    seconds = (4.0, 5.0, 3.0, 4.0, 4.0) if quick else (12.0, 8.0, 16.0, 8.0, 16.0)
    films()
    with serving("1epd", *options, *by_load) as server:
        return asyncio.run(measure(server, 1 if quick else 2, seconds, slo_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round; writes nothing")
    parser.add_argument("--slo", type=float, default=3.0, help="of the first token, seconds")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = measured(options.quick, options.slo)
    titles = {
        "summary": "All rounds (aim: by load, attainment of the best fixed one, and more accurate)",
        "rounds": "Each ramp, in the order they were run",
        "ramp": "The ramp, and seconds of a question when two are at the server",
        "changes": "Changes of the level; at_s: from the start of the ramp",
    }
    run_sections(
        "retention",
        "Retention by load",
        {name: Section(title, lambda name=name: found[name]) for name, title in titles.items()},  # type: ignore[misc]
        list(titles),
        lambda: setting(("ray", "torch"), checkpoint="shapes-vl, float32", topology="1epd, one thread"),
        save=not options.quick,
    )


if __name__ == "__main__":
    main()
