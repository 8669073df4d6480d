"""What `epd profile --app` asks the application: part of the composition root, see epd/cli.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epd.load.live_app import LiveApp, LoadResult
    from epd.load.media import MediaLibrary
    from epd.profiles import Profile
    from epd.profiles.app_costs import Asked

_SEED = 7_000
_NUM_KV_TOKENS = 32_768
Ask = Callable[..., "Asked"]


def with_app(profile: Profile, model: Path, show: Callable[[int, int], None]) -> Profile:
    """The profile with what the application costs on this machine. Starts it twice, in two layouts."""
    from epd.profiles import app_costs
    from epd.profiles.app_costs import LONG_TEXT, NUM_AT_ONCE, NUM_STEPS, AskedAll

    answer = {"output_tokens": NUM_STEPS + 1}
    video = {
        "videos": 1,
        "video_s": app_costs.VIDEO.duration_s,
        "video_size": str(app_costs.VIDEO.size),
        "num_requests": 6,
    }
    with tempfile.TemporaryDirectory(prefix="epd-profile-app-") as name:
        folder = Path(name)
        with _asking(model, "1epd", profile.num_threads, folder) as (ask, idle_cores):
            show(1, 4)
            alone: dict[str, Any] = {
                "text": ask(),
                "answer": ask(num_requests=8, **answer),
                "answers_at_once": ask(num_requests=16, concurrency=NUM_AT_ONCE, **answer),
                "long_text": ask(num_requests=6, text_tokens=LONG_TEXT),
                "image": ask(images=1),
                "video": ask(**video),
            }
        show(2, 4)
        with _asking(model, "1e1p1d", profile.num_threads, folder) as (ask, _):
            show(3, 4)
            split = {"split_answer": ask(num_requests=10, **answer), "split_image": ask(images=1)}
        show(4, 4)
    asked = AskedAll(**alone, **split)
    host = app_costs.host_costs(profile, asked, os.cpu_count() or 1, idle_cores)
    assumption = "the application's share: questions asked one after the other, of 1epd and 1e1p1d"
    return replace(
        profile,
        host=host,
        prompt=app_costs.prompt_rule(asked),
        assumptions=(*profile.assumptions, assumption),
    )


@contextmanager
def _asking(model: Path, topology: str, num_threads: int | None, folder: Path) -> Iterator[tuple[Ask, float]]:
    """A function that asks a running application, and the cores that it takes when idle."""
    from epd.cli_bench import _write_video
    from epd.load.live_app import live_app
    from epd.load.media import MediaLibrary

    library = MediaLibrary(folder / "media", _write_video)
    options = ["--topology", topology, "--num-kv-tokens", str(_NUM_KV_TOKENS)]
    options += ["--num-threads", str(num_threads or 1)]
    with live_app([str(model), *options], folder / f"{topology}.log") as app:
        seeds = iter(range(_SEED, _SEED + 1000))
        for fields in ({}, {"images": 1}, {"videos": 1, "video_s": 2, "video_size": "320x192"}):
            _ask(app, library, 0.0, next(seeds), num_requests=3, **fields)
        idle_cores = app.idle_cores()
        yield lambda **fields: _ask(app, library, idle_cores, next(seeds), **fields), idle_cores


def _ask(
    app: LiveApp,
    library: MediaLibrary,
    idle_cores: float,
    seed: int,
    *,
    num_requests: int = 14,
    concurrency: int = 1,
    **part: Any,
) -> Asked:
    from epd.profiles.app_costs import SHORT_TEXT
    from epd.workload_config import load_workload

    fields = {"text_tokens": SHORT_TEXT, "output_tokens": 1, **part}
    config = load_workload(None, {"arrival": "closed", "num_requests": num_requests, "mix": [fields]})
    result = app.load(config.resolve(), library, seed=seed, concurrency=concurrency)
    return _asked(result, idle_cores)


def _asked(result: LoadResult, idle_cores: float) -> Asked:
    from epd.errors import UnavailableError
    from epd.profiles.app_costs import Asked

    records, served = result.records, result.served
    failed = [record.error for record in records if record.error is not None]
    if failed or not served:
        raise UnavailableError(f"the application did not answer: {failed[:1] or 'its log is empty'}")

    times = [record.token_times_s for record in records]
    return Asked(
        ttft_s=_lower(each[0] - record.sent_s for each, record in zip(times, records, strict=True)),
        e2e_s=_lower(record.end_s - record.sent_s for record in records),
        cpu_s=max(0.0, result.cpu_s - idle_cores * result.elapsed_s) / len(records),
        encode_s=_lower(each.stages_s.get("encode", 0.0) for each in served),
        prefill_s=_lower(each.stages_s.get("prefill", 0.0) for each in served),
        prompt_tokens=_lower(float(each.prompt_tokens) for each in served),
        cached_tokens=_lower(float(each.cached_tokens) for each in served),
    )


def _lower(values: Iterable[float]) -> float:
    """The lower quartile."""
    import numpy as np

    return float(np.percentile(list(values), 25))
