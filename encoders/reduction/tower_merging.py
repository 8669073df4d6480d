"""Merges neighbours that look alike inside of a vision tower, so that its later layers compute fewer rows.

    unit              | a a b | a a a c c d |        cells of a frame, in blocks of 3 x 3
    first layers      | a a b | a a a c c d |        compute all
    later layers      | a b   | a c d       |        compute one row for each run of likes: their mean
    behind the tower  | a a b | a a a c c d |        every cell has a row again, its owner's

Which blocks are merged is as in `epd.encoders.reduction.merging`; how many cells are left of a unit is known
before it is encoded. So many rows leave the tower as ever: prompts, caches and transfers know nothing of it.

A cell is what becomes one token: one patch, or those that the tower's merger joins. Each unit is merged by
itself, so its embeddings do not depend on its batch. Shapes: U units, S cells of a unit, k cells left of it,
N patches of a cell, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from epd.encoders.adapter import PatchRun
from epd.encoders.device import to_device, to_host
from epd.encoders.plans import Grid
from epd.encoders.reduction.merging import SIDE, blocks_of, key_sets, likeness_at_once, means, num_keys
from epd.reduction import TowerMerge

# The raster place of each of a unit's cells in the tower's order, int64 [S]; of a grid of patches.
CellOrder = Callable[[Grid], Tensor]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Lists the cells of a unit that may be merged with each other.

    table: int64 [B, 9], the places in the tower's order of each block's cells; S where there is none.
    of_place: int64 [S], the block of each cell.
    """

    table: Tensor
    of_place: Tensor

    @classmethod
    def of(cls, height: int, width: int, order: Tensor | None = None) -> Blocks:
        """Cuts height x width cells. order: see `CellOrder`; None for raster order."""
        num_cells, blocks = height * width, blocks_of(height, width)
        place = torch.arange(num_cells) if order is None else order.argsort()
        table = torch.full((len(blocks), SIDE * SIDE), num_cells)
        of_place = torch.empty(num_cells, dtype=torch.int64)
        for number, cells in enumerate(blocks):
            table[number, : len(cells)] = place[cells]
            of_place[place[cells]] = number
        return cls(table, of_place)

    def num_kept(self, share: float) -> int:
        """Returns how many cells are left of a unit: its share, but one of each block, and the key set."""
        num_cells = len(self.of_place)
        return min(num_cells, max(round(share * num_cells), len(self.table) + num_keys(num_cells)))


@dataclass(frozen=True, slots=True)
class MergedCells:
    """Says which cells were merged.

    kept: int64 [U, k], ascending, the cells whose places the rows of the later layers have.
    there: int64 [U, S], which of the kept cells each cell has become.
    """

    kept: Tensor
    there: Tensor

    def merge(self, rows: Tensor) -> Tensor:
        """Averages the rows [U, S, C] of the cells that became one: [U, k, C]."""
        num_units, num_kept = self.kept.shape
        merged = means(rows.flatten(0, 1), self._flat(self.there), num_units * num_kept)
        return merged.view(num_units, num_kept, -1)

    def expand(self, rows: Tensor) -> Tensor:
        """Gives each cell the row [U * k, C] of the one that it has become: [U * S, C]."""
        return rows.index_select(0, self._flat(self.there))

    def _flat(self, places: Tensor) -> Tensor:
        units = torch.arange(len(places), device=places.device)
        return (places + units[:, None] * self.kept.shape[1]).flatten()


def merge_cells(cells: Tensor, blocks: Blocks, num_kept: int) -> MergedCells:
    """Merges the cells [U, S, C] of the blocks most alike until `num_kept` are left; of each unit by itself.

    num_kept: at least `Blocks.num_kept` of any share. Of a block that is merged in part the first cells are.
    """
    num_cells = cells.shape[1]
    table, of_place = (to_device(each, cells.device) for each in (blocks.table, blocks.of_place))
    tokens = normalize(cells.float(), dim=-1)
    is_member = ~key_sets(tokens)
    alike = likeness_at_once(tokens, is_member, of_place, len(table))  # [U, B]
    member = torch.cat([is_member, torch.zeros_like(is_member[:, :1])], dim=1)[:, table]  # [U, B, 9]
    gone = _gone(alike, member.sum(-1), num_cells - num_kept)[:, :, None]
    turn = member.cumsum(-1) - 1
    owner = (table * (member & (turn == gone // 2))).sum(-1, keepdim=True)  # the middle, as `_merge` has it
    own = torch.where(member & (gone > 0) & (turn <= gone), owner, table)
    owners = torch.arange(num_cells + 1, device=cells.device).repeat(len(cells), 1)
    owners.scatter_(1, table.flatten().expand(len(cells), -1), own.flatten(1))
    owners = owners[:, :num_cells]
    is_kept = owners == torch.arange(num_cells, device=cells.device)
    kept = is_kept.int().argsort(dim=1, descending=True, stable=True)[:, :num_kept]
    return MergedCells(kept, (is_kept.cumsum(1) - 1).gather(1, owners))


def _gone(alike: Tensor, num_members: Tensor, num_gone: int) -> Tensor:
    """Shares num_gone of each unit among its blocks, those most alike first: int64 [U, B].

    alike: [U, B]. num_members: int64 [U, B]; one of each stays.
    """
    order = alike.argsort(dim=1, descending=True, stable=True)
    most = (num_members - 1).clamp_min(0).gather(1, order)
    here = (num_gone - (most.cumsum(1) - most)).clamp_min(0).minimum(most)
    return torch.zeros_like(here).scatter_(1, order, here)


class TileMerger:
    """Merges in towers of whole tiles, hidden [U, rows before the patches + S, C]; a patch is a cell."""

    def __init__(self, layers: Sequence[nn.Module], patches_per_side: int, policy: TowerMerge) -> None:
        """Takes layers whose first argument is hidden. Raises RequestError for a layer too late."""
        self._layers = list(layers)[policy.layer_of(len(layers)) :]
        self._blocks = Blocks.of(patches_per_side, patches_per_side)
        self._num_kept = self._blocks.num_kept(policy.share)

    @contextmanager
    def during(self, runs: Sequence[PatchRun]) -> Iterator[None]:  # noqa: ARG002 # tiles are all alike
        num_cells = len(self._blocks.of_place)
        state: list[MergedCells] = []

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            before, cells = args[0][:, :-num_cells], args[0][:, -num_cells:]
            state[:] = [merge_cells(cells, self._blocks, self._num_kept)]
            return (torch.cat([before, state[0].merge(cells)], dim=1), *args[1:])

        def attend_all(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0], *(None for _ in args[1:]))  # a mask: no patch of a tile is masked

        def leave(_: nn.Module, __: tuple[Any, ...], hidden: Tensor) -> Tensor:
            before, rows = hidden[:, : -self._num_kept], hidden[:, -self._num_kept :]
            cells = state[0].expand(rows.flatten(0, 1)).view(len(rows), num_cells, -1)
            return torch.cat([before, cells], dim=1)

        with ExitStack() as hooks:
            if self._num_kept < num_cells:
                hooks.enter_context(_removed(self._layers[0].register_forward_pre_hook(enter)))
                for layer in self._layers:
                    hooks.enter_context(_removed(layer.register_forward_pre_hook(attend_all)))
                # Before what records the outputs of layers.
                last = self._layers[-1].register_forward_hook(leave, prepend=True)
                hooks.enter_context(_removed(last))
            yield


class RunMerger:
    """Merges in the Qwen towers, hidden [U * S * N, C], which attend within runs of patches."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        mergers: Sequence[nn.Module],
        patches_per_side_of_cell: int,
        policy: TowerMerge,
        order: CellOrder | None = None,
    ) -> None:
        """Takes a tower's layers, and what makes rows of cells, or of their patches, behind them.

        Raises as `TileMerger`.
        """
        self._layers = list(layers)[policy.layer_of(len(layers)) :]
        self._mergers = mergers
        self._side = patches_per_side_of_cell
        self._share = policy.share
        self._order = order

    @contextmanager
    def during(self, runs: Sequence[PatchRun]) -> Iterator[None]:
        grid, num_units = runs[0].grid, sum(run.grid.t for run in runs)
        order = self._order(grid) if self._order is not None else None
        blocks = Blocks.of(grid.h // self._side, grid.w // self._side, order)
        num_kept, num_cells = blocks.num_kept(self._share), len(blocks.of_place)
        state: list[_MergedRuns] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            cells = args[0].view(num_units, num_cells, -1)
            merged = merge_cells(cells, blocks, num_kept)
            state[:] = [_MergedRuns.of(merged, self._side**2, kwargs["position_embeddings"])]
            return (merged.merge(cells).view(-1, args[0].shape[1]), *args[1:]), kwargs

        def attend_fewer(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, **state[0].inputs(kwargs["cu_seqlens"])}

        def leave(_: nn.Module, __: tuple[Any, ...], rows: Tensor) -> Tensor:
            if not state:
                return rows
            cells = rows.view(num_units * num_kept, -1)  # of one row, or of their patches
            return state[0].merged.expand(cells).view(-1, rows.shape[1])

        with ExitStack() as hooks:
            if num_kept < num_cells:
                first = self._layers[0].register_forward_pre_hook(enter, with_kwargs=True)
                hooks.enter_context(_removed(first))
                for layer in self._layers:
                    later = layer.register_forward_pre_hook(attend_fewer, with_kwargs=True)
                    hooks.enter_context(_removed(later))
                for merger in self._mergers:
                    hooks.enter_context(_removed(merger.register_forward_hook(leave)))
            yield


@dataclass(frozen=True, slots=True)
class _MergedRuns:
    """Holds what later layers of a Qwen tower take.

    num_before: int64 [U * S + 1], the number of kept cells before each cell, on the host.
    """

    merged: MergedCells
    patches_per_cell: int
    num_before: Tensor
    position_embeddings: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, merged: MergedCells, patches_per_cell: int, positions: tuple[Tensor, Tensor]) -> _MergedRuns:
        num_units, num_cells = merged.there.shape
        units = torch.arange(num_units, device=merged.kept.device)[:, None]
        kept = (merged.kept + units * num_cells).flatten()
        is_kept = torch.zeros(num_units * num_cells + 1, dtype=torch.int64)
        is_kept[to_host(kept) + 1] = 1
        cos, sin = (
            each.view(-1, patches_per_cell, each.shape[1]).index_select(0, kept).flatten(0, 1)
            for each in positions
        )
        return cls(merged, patches_per_cell, is_kept.cumsum(0), (cos, sin))

    def inputs(self, run_ends: Tensor) -> dict[str, Any]:
        """Returns what replaces a layer's arguments. run_ends: int32 [runs + 1], of all patches."""
        ends = self.num_before[run_ends.long() // self.patches_per_cell] * self.patches_per_cell
        return {"cu_seqlens": ends.to(run_ends.dtype), "position_embeddings": self.position_embeddings}


@contextmanager
def _removed(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()
