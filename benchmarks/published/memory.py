"""Repeats the memory results of the EPD paper: tables 2, 3 and 8, and the weights by role of section 4.3.

One A100 for each worker. An encoder has all that its weights leave for activations. Where the language model
is, keys and values get 80 % of what the weights leave, the rest is for activations; in table 8 they get what
the activations of the request leave. Encode and prefill of a merged worker (DistServe's) take turns.

Two numbers a model are fitted, to the rows of FITTED_ROWS: activations of a tile in the tower, and of a token
in the language model. Weights, tiles and tokens are the models' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.published.tables import TABLE_2, TABLE_3, TABLE_8, WEIGHTS_SAVED, Row
from epd.profiles.analytic import analytic_profile
from epd.profiles.catalogue import MODELS
from epd.profiles.memory import MemoryLimits, MemoryNeeds
from epd.topology import Stage

_PATCHES_PER_TILE, _TEXT_TOKENS = 1024, 22
_IMAGES_PER_REQUEST = 10  # of table 3
_KV_SHARE = 0.8
_MOST = 1000
_LEAST_KV_SHARE = 0.005  # prints as 0 %

Roles = frozenset[Stage]
_ENCODE: Roles = frozenset({"encode"})
_PREFILL: Roles = frozenset({"prefill"})
_MERGED: Roles = frozenset({"encode", "prefill"})
_SYSTEMS: Mapping[str, tuple[Roles, ...]] = {"DistServe": (_MERGED,), "EPD": (_ENCODE, _PREFILL)}
_COLUMNS: Mapping[str, Roles] = {"DistServe E+P": _MERGED, "EPD E": _ENCODE, "EPD P": _PREFILL}

# (table, system, case, metric): the finest rows of table 3, three tiles an image.
FITTED_ROWS = frozenset(
    ("epd-table3", column, f"{model}, 3 tiles", "batch")
    for model in ("minicpm-v-2.6", "internvl2-8b", "internvl2-26b")
    for column in ("EPD E", "EPD P")
)


@dataclass(frozen=True, slots=True)
class PaperModel:
    """Describes a model in the paper's system.

    tile_bytes, token_bytes: activations, fitted
    context_tokens: of the configuration, times the factor of its rope scaling, as vLLM derives it; for
        internvl2-26b the 98,304 that table 8 implies
    tile_marks, image_marks: tokens around a tile and around an image
    tiles: by resolution; InternVL2 cuts by the ratio of the sides, so 313x234 is twelve and an overview
    """

    name: str
    tile_bytes: float
    token_bytes: float
    context_tokens: int
    tile_marks: int
    image_marks: int
    tiles: Mapping[str, int]

    @property
    def needs(self) -> MemoryNeeds:
        return replace(
            analytic_profile("a100-80gb", self.name).memory,
            encode_bytes_per_patch=self.tile_bytes / _PATCHES_PER_TILE,
            prefill_bytes_per_token=self.token_bytes,
            logits_bytes_per_sequence=0.0,
            fixed_bytes=0,
        )

    def num_tokens(self, num_images: int, num_tiles: int) -> int:
        """Returns the tokens of a request. num_tiles: of an image."""
        tile = MODELS[self.name].media.tile_tokens + self.tile_marks
        return _TEXT_TOKENS + num_images * (num_tiles * tile + self.image_marks)

    def kv_share(self, roles: Roles, num_images: int, num_tiles: int, batch: int = 1) -> float:
        """Returns what requests leave of the memory beside the weights, as a share; below 0 if too little."""
        limits = MemoryLimits(
            encode_patches=batch * num_images * num_tiles * _PATCHES_PER_TILE,
            pass_tokens=batch * self.num_tokens(num_images, num_tiles),
            utilization=1.0,
        )
        worker = self.needs.worker(roles, limits)
        return worker.free_bytes / (worker.free_bytes + worker.activation_bytes)

    def fits(self, roles: Roles, num_images: int, num_tiles: int, batch: int = 1) -> bool:
        """Returns whether activations leave what keys and values are to have."""
        wanted = 0.0 if roles == _ENCODE else _KV_SHARE
        return self.kv_share(roles, num_images, num_tiles, batch) >= wanted

    def is_within_context(self, num_images: int, num_tiles: int) -> bool:
        return self.num_tokens(num_images, num_tiles) <= self.context_tokens


_INTERNVL_TILES = {"313x234": 13, "787x444": 3, "4032x3024": 13}
PAPER_MODELS = {
    model.name: model
    for model in (
        PaperModel(
            "minicpm-v-2.6", 160e6, 220e3, 32_768, 2, 0, {"313x234": 1, "787x444": 3, "4032x3024": 10}
        ),
        PaperModel("internvl2-8b", 39.2e6, 160e3, 65_536, 0, 2, _INTERNVL_TILES),
        PaperModel("internvl2-26b", 102e6, 232e3, 98_304, 0, 2, _INTERNVL_TILES),
    )
}


def most(is_possible: Callable[[int], bool]) -> int:
    """Returns the largest number, from 0, up to which all are possible."""
    return next(number for number in range(_MOST) if not is_possible(number + 1))


def table_2() -> list[Row]:
    """Returns images per request, batch 1."""
    return list(_table_2())


def _table_2() -> Iterator[Row]:
    for name, sizes in TABLE_2.items():
        model = PAPER_MODELS[name]
        for size, systems in sizes.items():
            for system, published in systems.items():
                found = most(lambda n: _can_be_sent(model, system, n, model.tiles[size]))  # noqa: B023 - run at once
                yield Row(system, f"{name}, {size}", "images", found, published)


def _can_be_sent(model: PaperModel, system: str, num_images: int, num_tiles: int) -> bool:
    fits = all(model.fits(roles, num_images, num_tiles) for roles in _SYSTEMS[system])
    return fits and model.is_within_context(num_images, num_tiles)


def table_3() -> list[Row]:
    """Returns the largest batch of requests with ten images; 0 where not one fits."""
    return list(_table_3())


def _table_3() -> Iterator[Row]:
    for name, sizes in TABLE_3.items():
        model = PAPER_MODELS[name]
        for num_tiles, columns in sizes.items():
            case = f"{name}, {num_tiles} tile{'s' if num_tiles > 1 else ''}"
            for column, published in columns.items():
                roles = _COLUMNS[column]
                found = most(lambda n: model.fits(roles, _IMAGES_PER_REQUEST, num_tiles, n))  # noqa: B023 - run at once
                is_fitted = ("epd-table3", column, case, "batch") in FITTED_ROWS
                yield Row(column, case, "batch", found, published, is_fitted)


def table_8() -> list[Row]:
    """Returns the share of free memory that keys and values get, 4K images; 0 where no such request runs."""
    return list(_table_8())


def _table_8() -> Iterator[Row]:
    for name, systems in TABLE_8.items():
        model = PAPER_MODELS[name]
        num_tiles = model.tiles["4032x3024"]
        for system, cells in systems.items():
            for num_images, published in cells.items():
                share = model.kv_share(_SYSTEMS[system][-1], num_images, num_tiles)
                runs = model.is_within_context(num_images, num_tiles) and share >= _LEAST_KV_SHARE
                found = 100 * share if runs else 0.0
                yield Row(system, f"{name}, {num_images} images", "KV % of free memory", found, published)


def weights_by_role() -> list[Row]:
    """Returns the share of weights that a worker saves against one with all of them; nothing is fitted."""
    rows = []
    for name, saved in WEIGHTS_SAVED.items():
        needs = PAPER_MODELS[name].needs
        whole = needs.worker(_MERGED, MemoryLimits()).weight_bytes
        for system, roles in (("EPD E", _ENCODE), ("EPD P", _PREFILL)):
            found = 100 * (1 - needs.worker(roles, MemoryLimits()).weight_bytes / whole)
            rows.append(Row(system, name, "% of weights saved", found, saved[system]))
    return rows
