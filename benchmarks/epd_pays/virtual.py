"""Serves the layouts of a comparison of paced devices in virtual time: no pass is late on any machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from benchmarks.epd_pays.virtual_workers import run_virtual
from epd.bench.bench import Client
from epd.bench.compare import Case, Comparison, Serve, Served
from epd.bench.media import MediaLibrary
from epd.profiles.profile import Profile
from epd.serve_app.local.own_service import OwnService, started
from epd.serve_app.local.paced_layouts import OwnClient, PacedLayout, paced_args
from epd.serve_app.local.pacing import Pace
from epd.workload.comparison import Layout, Question, Round, Traffic


def virtual_layouts(question: Question, profile: Profile) -> Serve:
    """Returns what serves a layout of a question in the loop that runs, which is virtual.

    profile: of `paced_profile`
    """

    @asynccontextmanager
    async def serve(layout: Layout, traffic: Traffic) -> AsyncIterator[Served]:
        pace = Pace(profile, traffic.dilate)
        args = paced_args(layout, question, traffic.dilate).resolved()
        clients: list[tuple[str, Client]] = []
        async with AsyncExitStack() as stack:
            for _ in range(layout.num_copies):
                service, answers = await started(args, is_greedy=True, pace=pace)
                stack.push_async_callback(service.close)
                stack.callback(answers.close)
                own = OwnService(answers, asyncio.get_running_loop())
                clients.append((own.model, OwnClient(own, question.timeout_s)))
            yield PacedLayout(clients, pace)

    return serve


def run_case(found: Comparison, case: Case, serve: Serve, library: MediaLibrary) -> Round:
    """Runs a round, the same to the last bit on every machine. To be used within `virtual_workers`."""
    one = run_virtual(lambda: found.run(case, serve, library), case.index)
    return replace(one, load_average=None)
