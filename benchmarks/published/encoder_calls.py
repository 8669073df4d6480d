"""Derives tables 4 to 6 again, with the constant of table 4 as the cost of each call of the encoder.

The tables' profile takes that constant for reading images, beside the workers. The paper's public code does
not count reading: the server keeps the image, and a request's clock starts after it. Its optimum encodes two
images together, which gains something only where a call costs something whatever is in it. So here a call for
4K images has a fixed cost, and reading none; a call is a batch of images where they are shards, and a batch
of requests where they are not. Video frames keep their cost, as table 1 has no such constant.

One number is fitted, to the one row of FITTED_ROWS; all others of `PaperFit` stay, and no row of table 5 is
used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from benchmarks.published.paper import FOUR_K, Cell, cells_4, cells_6, paper_deployment, paper_profile
from benchmarks.published.table5 import paper_demand, paper_space
from benchmarks.published.tables import TABLE_5, TABLE_5_AT_OPTIMUM, Row
from epd.encode.sharding import Sharding
from epd.planning.goodput import goodput, simulate_at
from epd.planning.search import Planner, Scored
from epd.planning.space import Settings, Space
from epd.profiles.cost import StageCost
from epd.profiles.profile import Profile
from epd.simulate.deployment import Deployment

# (table, system, case, metric): the one that read_image_s of `PaperFit` depends on most.
FITTED_ROWS = frozenset({("epd-table4", "sharding on", "2 images", "TTFT mean s")})
CALL_S = 0.3

_IMAGES_PER_REQUEST = 6  # of table 5
_ENCODE_BATCHES, _PREFILL_BATCHES, _DECODE_BATCHES = (1, 2), (1, 2), (1, 128)
_SHARDINGS: tuple[Sharding, ...] = ("groups", "request")


def call_profile(call_s: float = CALL_S) -> Profile:
    """Returns the tables' profile with a cost for each call of the encoder instead of reading images."""
    base = paper_profile()
    assert base.images is not None
    return replace(
        base,
        name="minicpm-v-2.6@epd-paper-calls",
        encode=replace(base.encode, cost=replace(base.encode.cost, fixed_s=call_s)),
        images=replace(base.images, cost=StageCost()),
    )


def encode_patches(batch: int, sharding: Sharding, images_per_request: int) -> int:
    """Returns the patches of a call: of `batch` images, or of requests where these are encoded whole."""
    image = paper_profile().media.image(FOUR_K).num_patches
    return batch * image * (images_per_request if sharding == "request" else 1)


def cells() -> Iterator[Cell]:
    """Yields the cells of tables 4 and 6, with batches of one as they have them."""
    for cell in (*cells_4(), *cells_6()):
        deployment = cell.experiment.deployment
        num_images = len(cell.experiment.shapes[0].images)
        patches = encode_patches(1, deployment.sharding, num_images)
        deployment = replace(deployment, max_batch_patches=patches)
        yield replace(cell, experiment=replace(cell.experiment, deployment=deployment))


def cell_rows(profile: Profile, cell: Cell) -> Iterator[Row]:
    for row in cell.rows(profile):
        is_fitted = (cell.table, row.system, row.case, row.metric) in FITTED_ROWS
        yield replace(row, system=f"table {cell.table[-1]}, {row.system}", is_fitted=is_fitted)


def best_plan(profile: Profile, space: Space) -> Scored:
    """Returns the best of a space, batches of one or two images or requests in a call included."""
    found = []
    for sharding in space.shardings:
        patches = tuple(encode_patches(each, sharding, _IMAGES_PER_REQUEST) for each in _ENCODE_BATCHES)
        space = replace(space, encode_patches=patches, shardings=(sharding,))
        planner = Planner(profile, paper_demand(profile), space, paper_deployment("6e1p1d"))
        found.append(planner.search().winner)
    return max(found, key=lambda each: each.goodput)


def deployment_of(topology: str, encode: int, prefill: int, decode: int, sharding: Sharding) -> Deployment:
    """Returns a configuration of table 5. encode, prefill, decode: batches."""
    base = paper_deployment(topology)
    patches = encode_patches(encode, sharding, _IMAGES_PER_REQUEST)
    whole = base.language.max_chunk_tokens
    return Settings(patches, prefill, decode, whole, sharding).deployment(base.topology, base)


def random_goodputs(profile: Profile, seed: int = 0, num: int = 10) -> list[float]:
    """Returns goodputs of some configurations, drawn from all with equal chances."""
    rng = np.random.default_rng(seed)
    layouts = [str(each) for each in Space(8).topologies() if len(each.groups) == 3]
    choices = list(product(layouts, _ENCODE_BATCHES, _PREFILL_BATCHES, _DECODE_BATCHES, _SHARDINGS))
    drawn = [choices[int(index)] for index in rng.integers(len(choices), size=num)]
    return [goodput(profile, deployment_of(*each), paper_demand(profile)) for each in drawn]


def batches(settings: Settings) -> str:
    """Returns the batches of encode, prefill and decode as the paper writes them."""
    batch = settings.encode_patches // encode_patches(1, settings.sharding, _IMAGES_PER_REQUEST)
    return f"{batch}/{settings.language_seqs}/{settings.decode_seqs}"


def table_5_rows(profile: Profile) -> Iterator[Row]:
    best, rate = best_plan(profile, paper_space()), TABLE_5["optimum"]
    case = f"{best.candidate.topology}, batch {batches(best.candidate.settings)}"
    mean = float(np.mean(random_goodputs(profile)))
    yield Row("table 5, optimum", case, "goodput 1/s", best.goodput, rate)
    yield Row("table 5, mean of 10 random", "6 images", "goodput 1/s", mean, TABLE_5["mean of 10 random"])
    gain = rate / TABLE_5["mean of 10 random"]
    yield Row("table 5, optimum / random", case, "ratio", best.goodput / mean, gain)
    deployment = deployment_of("6e1p1d", 2, 1, 128, "groups")
    loaded = simulate_at(profile, deployment, paper_demand(profile), rate)
    for metric, value in (("TTFT mean s", loaded.ttft_s.mean()), ("TPOT mean s", loaded.tpot_s.mean())):
        case = f"{rate} requests/s, 6e1p1d, batch 2/1/128"
        yield Row("table 5, optimum", case, metric, float(value), TABLE_5_AT_OPTIMUM[metric])


def encoder_calls() -> list[Row]:
    """Returns the rows of tables 4, 6 and 5 under this assumption."""
    profile = call_profile()
    return [*(row for cell in cells() for row in cell_rows(profile, cell)), *table_5_rows(profile)]
