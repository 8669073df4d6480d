"""Options of traffic, which `epd bench`, `epd simulate` and `epd plan` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from epd.errors import RequestError
from epd.kv.drafting import DEFAULT_MAX_DRAFT, MOST_DRAFTS
from epd.serve_app.cli.options import Seed


def _at_least_one(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise RequestError(f"received {value} threads; allowed: at least 1")
    return value


Workload = Annotated[
    str | None,
    typer.Option("--workload", metavar="NAME", help="text, images, video, mixed, or a YAML or JSON file."),
]
Rate = Annotated[
    float | None,
    typer.Option("--rate", metavar="R", help="Requests per second; for a trace, its mean after scaling."),
]
NumRequests = Annotated[int | None, typer.Option("--num-requests", metavar="N", help="Number of requests.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Azure's LMM trace (CSV), Mooncake's (JSON lines), or a log of epd serve.",
    ),
]
RepeatRate = Annotated[
    float | None,
    typer.Option("--repeat-rate", metavar="P", help="Share of requests about media sent before; 0 is cold."),
]
RepeatSkew = Annotated[
    float | None,
    typer.Option(
        "--repeat-skew",
        metavar="S",
        help="Prefer later media for repeats: the k-th latest by 1 / k**S; 0 for all alike.",
    ),
]
QuestionsPerMedia = Annotated[
    int | None,
    typer.Option(
        "--questions-per-media", metavar="N", help="Requests about the same media, instead of --repeat-rate."
    ),
]
SloTtft = Annotated[
    float | None,
    typer.Option("--slo-ttft-s", metavar="S", help="Objective: time to first token, in seconds."),
]
SloTpot = Annotated[
    float | None,
    typer.Option("--slo-tpot-s", metavar="S", help="Objective: time per output token after it, in seconds."),
]
Attainment = Annotated[
    float, typer.Option(metavar="P", help="Share of the requests that must meet the objectives.")
]
AskedModel = Annotated[
    str,
    typer.Option("--model", metavar="NAME", help="Model to ask for; by default the first that is listed."),
]
BenchKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="EPD_BENCH_API_KEY", metavar="KEY", help="Key to send to every server."),
]
MediaDir = Annotated[
    Path | None,
    typer.Option("--media-dir", metavar="DIR", help="Keep the drawn media in this folder, and reuse them."),
]
CpuThreads = Annotated[
    int | None,
    typer.Option("--cpu-threads", metavar="N", callback=_at_least_one, help="Threads that read media."),
]
VideoGpus = Annotated[
    int,
    typer.Option(
        "--video-gpus",
        metavar="N",
        min=0,
        help="GPUs of a machine that decode videos beside these threads, as epd serve --video-device does.",
    ),
]
EncodesBeside = Annotated[
    bool,
    typer.Option(
        "--encode-beside/--no-encode-beside",
        help="Workers with other roles too encode beside them, as epd serve does by default, or in turns.",
    ),
]
GroupTokens = Annotated[
    int | None,
    typer.Option(
        "--group-tokens",
        metavar="N",
        min=1,
        help="Visual tokens of a video that travel together, cut as epd serve does. By default the frames "
        "that the profile names, or 8.",
    ),
]
DraftAcceptance = Annotated[
    float,
    typer.Option(
        "--draft-acceptance",
        metavar="P",
        help="How often a drafted token holds, as --draft auto of epd serve reports it; 0 for no drafts.",
    ),
]
MaxDraft = Annotated[
    int,
    typer.Option("--max-draft", metavar="N", help=f"Tokens drafted at most in one pass, 1 to {MOST_DRAFTS}."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """Holds which requests come, and their objectives. Every field is a flag."""

    workload: Workload = None
    trace: Trace = None
    repeat_rate: RepeatRate = None
    repeat_skew: RepeatSkew = None
    questions_per_media: QuestionsPerMedia = None
    seed: Seed = 0
    slo_ttft_s: SloTtft = None
    slo_tpot_s: SloTpot = None

    @property
    def repeats(self) -> dict[str, Any]:
        """Returns the options of a workload that say how media repeat."""
        return {
            "repeat_rate": self.repeat_rate,
            "repeat_skew": self.repeat_skew,
            "questions_per_media": self.questions_per_media,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions(TrafficOptions):
    """Holds also how a simulated fleet works on them."""

    cpu_threads: CpuThreads = None
    video_gpus: VideoGpus = 0
    encode_beside: EncodesBeside = True
    group_tokens: GroupTokens = None
    draft_acceptance: DraftAcceptance = 0.0
    max_draft: MaxDraft = DEFAULT_MAX_DRAFT
