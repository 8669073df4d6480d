"""Declares the options that `epd plan` alone has: the question of a buyer, and the devices to choose from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epd.planning.question import rate_of
from epd.serve_app.cli.options import _output

_ASKED, _FLEETS = "What is asked", "Devices to choose from"

Gpus = Annotated[int, typer.Option(metavar="N", help="Devices to lay out, 1 to 256.")]
Attainment = Annotated[
    float, typer.Option(metavar="P", help="Share of the requests that must meet the objectives.")
]
MinRate = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        parser=rate_of,
        help="Requests that must be served: 20 a second, or 20/min, 1000/h, 5000/day.",
    ),
]
MinRetention = Annotated[
    float, typer.Option(metavar="P", help="Lowest share of visual tokens to keep; below 1 costs accuracy.")
]
MaxDegree = Annotated[
    int,
    typer.Option(
        "--max-tensor-parallel",
        metavar="N",
        help="Most devices that a worker may share its layers over: 1, 2, 4 or 8.",
    ),
]
VideosPerMinute = Annotated[
    float | None,
    typer.Option(
        "--videos-per-minute",
        metavar="N",
        min=0.001,
        rich_help_panel=_ASKED,
        help="Requests a minute about one video each, instead of --workload.",
    ),
]
Minutes = Annotated[
    float, typer.Option("--minutes", metavar="M", rich_help_panel=_ASKED, help="Length of each video.")
]
VideoSize = Annotated[
    str, typer.Option("--video-size", metavar="WxH", rich_help_panel=_ASKED, help="Size of each video.")
]
VideoFps = Annotated[
    int,
    typer.Option("--video-fps", metavar="N", rich_help_panel=_ASKED, help="Frames a second of each video."),
]
AnswerTokens = Annotated[
    int, typer.Option("--answer-tokens", metavar="N", rich_help_panel=_ASKED, help="Tokens of each answer.")
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="NAME=VALUE",
        rich_help_panel=_ASKED,
        help="Plan the best fleet again with another frames, fps, max-visual-tokens, minutes or "
        "answer-tokens. Repeatable.",
    ),
]
PlannedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        rich_help_panel=_FLEETS,
        help="Name of a checkpoint of docs/models.md, a folder with a config.json, or that file.",
    ),
]
FleetNames = Annotated[
    list[str] | None,
    typer.Option(
        "--fleet",
        metavar="FLEET",
        rich_help_panel=_FLEETS,
        help="Devices to compare: 8xh100, a mix 4xh100+8xl40s, or l40s for as many as are needed. "
        "Repeatable.",
    ),
]
DeviceFile = Annotated[
    Path | None,
    typer.Option(
        "--devices", metavar="FILE", rich_help_panel=_FLEETS, help="YAML file of devices and prices of yours."
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="PRICE",
        parser=lambda text: 3600 * rate_of(text),
        rich_help_panel=_FLEETS,
        help="What all devices may cost: 30/h, 20000/month.",
    ),
]
RankBy = Annotated[
    str,
    typer.Option(
        "--rank-by", metavar="WHAT", rich_help_panel=_FLEETS, help="cost or throughput: the order of fleets."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", callback=_output, help="Write the answer as one HTML page, to hand on."
    ),
]
