"""Simulates the experiments of the EPD paper: MiniCPM-V 2.6 on 8 x A100, one 4K image = ten tiles.

One profile serves all tables. Six of its numbers are fitted, to the seven rows of FITTED_ROWS and no others;
the rest is computed (`epd.profiles.analytic`). A video frame is one tile, so that tables 4 and 1 share the
cost of a tile; the constant part of table 4 is taken for reading 12 megapixel images, in parallel on the
host, which table 1 does not have (`benchmarks.published.encoder_calls` takes it for something else).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.published.sharding import one_run_each
from benchmarks.published.tables import TABLE_1, TABLE_4, TABLE_6, Row
from epd.encode.sharding import Sharding
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.analytic import Efficiency, analytic_profile
from epd.profiles.cost import StageCost
from epd.profiles.profile import Profile
from epd.simulate.deployment import Deployment
from epd.simulate.placement import Elasticity
from epd.simulate.records import SimulationResult
from epd.simulate.requests import Job, JobMaker
from epd.simulate.simulation import Simulation
from epd.topology import parse_topology
from epd.workload.arrivals import poisson_arrivals
from epd.workload.requests import RequestShape, Resolution, TraceShapes, VideoSpec, Workload

FOUR_K = Resolution(4032, 3024)
_FRAME = Resolution(1280, 720)
_TILE_PATCHES, _TILE_TOKENS = 1024, 64
_NUM_REQUESTS, _NUM_ROUNDS = 100, 3
_PROMPT_TOKENS, _OUTPUT_TOKENS = 22, 10
_CODEC = "frames"  # given as frames: nothing to decode

# (table, system, case, metric)
FITTED_ROWS = frozenset(
    {
        ("epd-table4", "sharding on", "2 images", "TTFT mean s"),
        ("epd-table4", "sharding off", "8 images", "TTFT mean s"),
        ("epd-table1", "EPD", "8 frames", "TTFT mean s"),
        ("epd-table1", "DistServe", "64 frames", "TTFT mean s"),
        ("epd-table6", "switching off", "5e1p2d", "TTFT mean s"),
        ("epd-table6", "switching off", "5e1p2d", "TPOT mean s"),
        ("epd-table6", "switching on", "5e1p2d", "TPOT mean s"),
    }
)


_PASS_S = 0.002


@dataclass(frozen=True, slots=True)
class PaperFit:
    """Holds the fitted seconds: least squares of the logarithms' errors on FITTED_ROWS, rounded."""

    encode_tile_s: float = 0.0433
    prefill_tile_s: float = 0.0022
    prefill_pass_s: float = 0.136
    read_image_s: float = 0.474
    decode_step_s: float = 0.0163
    decode_sequence_s: float = 0.00335


def assumed_profile(model: str) -> Profile:
    """Returns a model on an A100 as it was computed when numbers were fitted.

    Half of the FLOPs, and 2 ms a pass in the place of launches.
    """
    found = analytic_profile("a100-80gb", model, Efficiency(compute=0.5, launch_s=0.0, replay_s=0.0))
    prefill, decode = (
        replace(table, cost=replace(table.cost, fixed_s=_PASS_S)) for table in (found.prefill, found.decode)
    )
    return replace(found, prefill=prefill, decode=decode)


def paper_profile(fit: PaperFit | None = None) -> Profile:
    """Returns the analytic profile with the fitted numbers in it."""
    fit = fit or PaperFit()
    base = assumed_profile("minicpm-v-2.6")
    assert base.images is not None
    per_context_s = base.decode.cost.per_item_s
    return replace(
        base,
        name="minicpm-v-2.6@epd-paper",
        media=replace(base.media, group_frames=1),
        encode=replace(base.encode, cost=StageCost(per_unit_s=fit.encode_tile_s / _TILE_PATCHES)),
        prefill=replace(
            base.prefill, cost=StageCost(fit.prefill_pass_s, 0.0, fit.prefill_tile_s / _TILE_TOKENS)
        ),
        decode=replace(
            base.decode, cost=StageCost(fit.decode_step_s, 0.0, fit.decode_sequence_s, per_context_s)
        ),
        images=replace(
            base.images, cost=StageCost(per_unit_s=fit.read_image_s / (FOUR_K.width * FOUR_K.height))
        ),
        video={_CODEC: replace(base.images, cost=StageCost())},
        assumptions=(*base.assumptions, "encode, prefill, decode and image reading fitted to the EPD paper"),
    )


def limits(batch: int) -> SchedulerConfig:
    """Allows whole prompts, `batch` requests at once."""
    return SchedulerConfig(max_num_batched_tokens=2**17, max_num_seqs=batch, max_chunk_tokens=2**17)


def paper_deployment(topology: str, sharding: Sharding = "groups") -> Deployment:
    """Uses FCFS, batch 1 for encode and prefill, 128 for decode; requests in shards, stages in sequence."""
    parsed = parse_topology(topology)
    is_merged = any({"prefill", "decode"} <= group.roles for group in parsed.groups)
    return Deployment(
        parsed,
        language=limits(128 if is_merged else 1),
        decode=limits(128),
        max_batch_patches=1,
        sharding=sharding,
        is_overlapped=False,
        deal=one_run_each,
        encode_beside=False,
        cpu_threads=64,
    )


def images(count: int, output_tokens: int = _OUTPUT_TOKENS) -> RequestShape:
    return RequestShape(_PROMPT_TOKENS, output_tokens, (FOUR_K,) * count)


def frames(count: int) -> RequestShape:
    """Returns a video with `count` sampled frames, two a second."""
    return RequestShape(_PROMPT_TOKENS, _OUTPUT_TOKENS, videos=(VideoSpec(count / 2, 24, _FRAME),))


@dataclass(frozen=True, slots=True)
class Experiment:
    """Describes one cell of a table: shapes in order of arrival, at a Poisson rate."""

    deployment: Deployment
    rate_per_s: float
    shapes: Sequence[RequestShape]
    elasticity: Elasticity | None = None

    def jobs(self, profile: Profile, round_index: int = 0) -> Iterator[Job]:
        """Draws the requests of a round."""
        workload = Workload(
            "paper", poisson_arrivals(self.rate_per_s), TraceShapes(tuple(self.shapes)), len(self.shapes)
        )
        return JobMaker(profile, _CODEC).jobs(workload.requests(0, round_index))

    def run(self, profile: Profile, round_index: int = 0, *, has_spans: bool = False) -> SimulationResult:
        simulation = Simulation(profile, self.deployment, elasticity=self.elasticity, has_spans=has_spans)
        return simulation.run(self.jobs(profile, round_index))

    def means(self, profile: Profile) -> dict[str, float]:
        """Averages rounds of a hundred requests, since one draw of arrivals moves a mean by some percent."""
        runs = [self.run(profile, index) for index in range(_NUM_ROUNDS)]
        figures = {
            "TTFT mean s": [run.ttft_s.mean() for run in runs],
            "TPOT mean s": [run.tpot_s.mean() for run in runs],
            "E2E mean s": [run.e2e_s.mean() for run in runs],
        }
        return {name: float(np.mean(values)) for name, values in figures.items()}


@dataclass(frozen=True, slots=True)
class Cell:
    """Holds one experiment of a table, and its published figures by metric."""

    table: str
    system: str
    case: str
    experiment: Experiment
    published: Mapping[str, float]

    def rows(self, profile: Profile) -> list[Row]:
        found = self.experiment.means(profile)
        return [
            Row(self.system, self.case, metric, found[metric], value, self._is_fitted(metric))
            for metric, value in self.published.items()
        ]

    def _is_fitted(self, metric: str) -> bool:
        return (self.table, self.system, self.case, metric) in FITTED_ROWS

    @property
    def has_fitted(self) -> bool:
        return any(map(self._is_fitted, self.published))


def cells_4() -> Iterator[Cell]:
    """Simulates sharding of one request's images on and off, 0.25 requests/s, on six encoders.

    Six fit better than the five of the paper's text.
    """
    for system, cells in TABLE_4.items():
        deployment = paper_deployment("6e1p1d", "groups" if system == "sharding on" else "request")
        for count, published in cells.items():
            experiment = Experiment(deployment, 0.25, [images(count)] * _NUM_REQUESTS)
            yield Cell("epd-table4", system, f"{count} images", experiment, {"TTFT mean s": published})


_TABLE_1_LAYOUTS = {
    "EPD": paper_deployment("5e2p1d"),
    "DistServe": paper_deployment("7ep1d", "local"),
    "vLLM": paper_deployment("8epd", "local"),
}


def cells_1() -> Iterator[Cell]:
    """Simulates frames of Video-MME at one request a second, on three systems."""
    for system, cells in TABLE_1.items():
        for count, published in cells.items():
            experiment = Experiment(_TABLE_1_LAYOUTS[system], 1.0, [frames(count)] * _NUM_REQUESTS)
            yield Cell("epd-table1", system, f"{count} frames", experiment, {"TTFT mean s": published})


TABLE_6_ELASTICITY = Elasticity()  # as it is by default: the paper gives no thresholds
TABLE_6_SHAPES = (images(1, 50),) * 10 + (images(1, 500),) * 90


def cells_6() -> Iterator[Cell]:
    """Simulates three requests/s with one image each; answers get ten times longer after the first ten."""
    for system, published in TABLE_6.items():
        elasticity = TABLE_6_ELASTICITY if system == "switching on" else None
        experiment = Experiment(paper_deployment("5e1p2d"), 3.0, TABLE_6_SHAPES, elasticity)
        yield Cell("epd-table6", system, "5e1p2d", experiment, published)


def rows_of(cells: Iterable[Cell], profile: Profile | None = None) -> list[Row]:
    profile = profile or paper_profile()
    return [row for cell in cells for row in cell.rows(profile)]


def table_4() -> list[Row]:
    return rows_of(cells_4())


def table_1() -> list[Row]:
    return rows_of(cells_1())


def table_6() -> list[Row]:
    return rows_of(cells_6())


_OVERLAP_SHARDINGS: Mapping[str, Sharding] = {"one encoder, ": "request", "": "groups"}


def overlap_rows(profile: Profile | None = None) -> list[Row]:
    """Simulates the paper's 64 frames at one request a second on one encoder or sharded over all five.

    Stages run in sequence, or groups are prefilled as they come. Beside its 1.00 s: with the fixed cost of a
    prefill pass fitted to its system, which every chunk pays again, and with that of the analytic profile.
    """
    fitted = profile or paper_profile()
    light = replace(fitted, prefill=replace(fitted.prefill, cost=_light_pass(fitted.prefill.cost)))
    rows = []
    for name, each in (("fitted pass", fitted), ("analytic pass", light)):
        for order, is_overlapped in (("one after another", False), ("groups overlapped", True)):
            for prefix, sharding in _OVERLAP_SHARDINGS.items():
                layout = paper_deployment("5e2p1d", sharding)
                deployment = replace(layout, is_overlapped=is_overlapped, language=limits(16))
                found = Experiment(deployment, 1.0, [frames(64)] * _NUM_REQUESTS).means(each)["TTFT mean s"]
                row = Row(f"{prefix}{order}, {name}", "64 frames", "TTFT mean s", found, TABLE_1["EPD"][64])
                rows.append(row)
    return rows


def _light_pass(cost: StageCost) -> StageCost:
    analytic = assumed_profile("minicpm-v-2.6").prefill.cost
    return replace(cost, fixed_s=analytic.fixed_s + analytic.floor_s)
