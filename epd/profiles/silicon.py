"""Makes profiles from a user's copy of AIConfigurator's tables of measured kernels (Apache-2.0).

    FOLDER/…/h100_sxm.yaml                                      bandwidth, memory, FLOPs, watts
    FOLDER/…/data/h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet   latency in ms by m, n, k and type

Older releases have text with commas, `data/h100_sxm/vllm/0.10.0/gemm_perf.txt`, which is read too.
A pass is the sum of its kernels: four matrix products and an attention in each layer, and what lies between
them at the bandwidth of the memory. Several devices have the kernels of their shares, and two sums a layer.
The tables time a product in a burst of 30; a pass goes on at the power limit, so its products have a highest
rate. Towers and prefill are launched from Python, kernel by kernel, and take at least as long as that.
Points are fitted as measured ones are. Between the sizes of a table the latency lies on a line of logarithms.
Products of the language model may be of 8 bits, as far as the tables have them; all else has 16. Experts are
those of the table whose sizes are the model's, drawn as AIConfigurator draws them: few of them often.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from epd.errors import RequestError
from epd.profiles.accelerators import DEVICES, Device, Devices
from epd.profiles.analytic import AS_FAST_IN_FP8, LAUNCH_S, analytic_profile
from epd.profiles.catalogue import model_named
from epd.profiles.cost import Measurement, StageTable, fit_experts, fit_roofline
from epd.profiles.profile import Profile
from epd.profiles.shapes import Transformer
from epd.profiles.silicon_tables import BACKENDS, Grid, Row, between, newest, number, read

SYSTEMS: Mapping[str, str] = {
    "a100-80gb": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
}
_TYPE, _BYTES = "bfloat16", 2
PRODUCTS: Mapping[str, int] = {_TYPE: 2, "fp8": 1, "fp8_block": 1}  # bytes of a weight
_DRAWN = "power_law_1.01"  # how the tables' tokens choose experts
# Sizes of the points that costs are fitted to.
_NEW_TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16_384)
_SEQUENCES, _CONTEXTS = (1, 8, 32, 64, 128), (512, 2048, 8192)
_PATCHES = (256, 1024, 4096, 16_384, 32_768)
# From our H100 (benchmarks/results/gpu.md): in prefill of 2,048 tokens products reach 656 TFLOP/s of 989.
_SUSTAINED = 0.66
_NEIGHBOURS = 4  # shapes of matrices between which one lies that no table has
# Of a token and layer, between matrix products: values read and written, in widths of the model and of the
# MLP, by passes over memory. Two norms, two sums, rotations, and an activation of two inputs.
_HIDDEN_VALUES, _MLP_VALUES, _PASSES = 10, 3, 6


@dataclass(frozen=True)
class Silicon:
    """Holds the tables of one system and backend.

    products: type of the language model's matrix products, of PRODUCTS
    tables: the version of each table's file, and its rows
    """

    system: str
    products: str
    device: Device
    bytes_per_s: float
    pass_s: float
    tables: Mapping[str, tuple[str, Sequence[Row]]]

    def _matrices(self, kind: str) -> Mapping[tuple[float, float], Mapping[float, float]]:
        if kind not in self._known_matrices:
            found: dict[tuple[float, float], dict[float, float]] = {}
            for row in self._rows("gemm", gemm_dtype=kind):
                known, m = found.setdefault((number(row, "n"), number(row, "k")), {}), number(row, "m")
                known[m] = min(number(row, "latency") / 1000, known.get(m, math.inf))
            self._known_matrices[kind] = found
        return self._known_matrices[kind]

    @cached_property
    def _known_matrices(self) -> dict[str, Mapping[tuple[float, float], Mapping[float, float]]]:
        return {}

    def _rows(self, table: str, **fields: str) -> list[Row]:
        """Returns the rows with these fields, without windows. Raises RequestError for none."""
        _, rows = self.tables.get(table, ("", ()))
        found = [
            row
            for row in rows
            if all(str(row.get(name, value)) == value for name, value in fields.items())
            and float(row.get("window_size") or 0) == 0
        ]
        if not found:
            told = ", ".join(f"{name} {value}" for name, value in fields.items())
            raise RequestError(
                f"received tables of {self.system} whose {table} has no rows of {told}; allowed: tables "
                "with them; name another backend or type of products, or take --profile MODEL@DEVICE"
            )
        return found

    def matrix_s(self, m: int, n: int, k: int, kind: str = _TYPE) -> float:
        """Returns the seconds of a matrix product of m x k by k x n, as fast as it can go on."""
        flops_per_s = self.device.flops_per_s * PRODUCTS[_TYPE] / PRODUCTS[kind]
        return max(2 * m * n * k / (_SUSTAINED * flops_per_s), self._burst_s(m, n, k, kind))

    def _burst_s(self, m: int, n: int, k: int, kind: str) -> float:
        matrices = self._matrices(kind)
        near = sorted((math.hypot(math.log(n / each[0]), math.log(k / each[1])), each) for each in matrices)
        near = near[:_NEIGHBOURS]
        total = sum(1 / max(distance, 1e-6) ** 2 for distance, _ in near)
        return (
            sum(
                between(matrices[each], m) * (n * k) / (each[0] * each[1]) / max(distance, 1e-6) ** 2
                for distance, each in near
            )
            / total
        )

    def attention_s(self, table: str, of: Transformer, first: float, second: float) -> float:
        """Returns the seconds of one layer's attention.

        first, second: sequences and the tokens of each, new ones but for `generation_attention`
        """
        key = (table, of.num_heads, of.num_kv_heads, of.head_dim)
        if key not in self._grids:
            self._grids[key] = self._grid(*key)
        grid, num_heads = self._grids[key]
        return grid.seconds(first, second) * of.num_heads / num_heads

    @cached_property
    def _grids(self) -> dict[tuple[str, int, int, int], tuple[Grid, float]]:
        return {}

    def _grid(self, table: str, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Grid, float]:
        """Returns the table of the nearest heads, and how many these are."""
        fields = {"attn_dtype": _TYPE} | ({} if table == "encoder_attention" else {"kv_cache_dtype": _TYPE})
        rows = self._rows(table, **fields)

        def kv_heads(row: Row) -> float:
            return float(row.get("num_key_value_heads") or row["num_heads"])

        def distance(row: Row) -> tuple[float, float, float]:
            heads, dim = number(row, "num_heads"), number(row, "head_dim")
            ratio = (num_heads / num_kv_heads) / (heads / kv_heads(row))
            return abs(math.log(head_dim / dim)), abs(math.log(ratio)), abs(math.log(num_heads / heads))

        nearest = min(map(distance, rows))
        own = [row for row in rows if distance(row) == nearest]
        is_step = table == "generation_attention"
        points = (
            (
                number(row, "batch_size"),
                number(row, "isl") + (number(row, "step") if is_step else 0.0),
                number(row, "latency") / 1000,
            )
            for row in own
        )
        # Heads of another width cost in proportion to it.
        return Grid.of(points), number(own[0], "num_heads") * number(own[0], "head_dim") / head_dim

    @cached_property
    def sums(self) -> Grid:
        """Seconds until several devices have the sum of what each computed, by devices and values."""
        names = ("num_gpus", "message_size", "latency")
        _, known = self.tables.get(_SUMS, ("", ()))
        rows = ([number(row, each) for each in names] for row in known)
        return Grid.of((devices, values, latency / 1000) for devices, values, latency in rows)

    def experts_s(self, of: Transformer, tokens: int, num_devices: int) -> float:
        """Returns the seconds of one layer's experts, which the devices share by width, and of their router.

        Raises RequestError for sizes that the table lacks.
        """
        sizes = {"hidden_size": of.hidden, "inter_size": of.mlp_hidden, "topk": of.num_active_experts}
        sizes |= {"num_experts": of.num_experts, "moe_tp_size": num_devices, "moe_ep_size": 1}
        fields = {name: str(value) for name, value in sizes.items()}
        rows = self._rows("moe", moe_dtype=self.products, distribution=_DRAWN, **fields)
        points = {number(row, "num_tokens"): number(row, "latency") / 1000 for row in rows}
        return between(points, tokens) + self.matrix_s(tokens, of.num_experts, of.hidden)

    def layers_s(
        self, of: Transformer, tokens: int, attention_s: float, kind: str = _TYPE, num_devices: int = 1
    ) -> float:
        """Returns the seconds of all layers for so many tokens.

        of: the share of each device, whole experts. attention_s: of one layer's. kind: of its products
        """
        queries, keys = of.num_heads * of.head_dim, of.num_kv_heads * of.head_dim
        has_experts = of.num_experts > 1
        mlp_hidden = of.shared_mlp_hidden // num_devices if has_experts else of.mlp_hidden
        widths = [(queries + 2 * keys, of.hidden), (of.hidden, queries)]
        if mlp_hidden:
            widths += [((of.mlp_matrices - 1) * mlp_hidden, of.hidden), (of.hidden, mlp_hidden)]
        values = tokens * (_HIDDEN_VALUES * of.hidden + _MLP_VALUES * mlp_hidden)
        between_s = values * _BYTES / self.bytes_per_s + _PASSES * self.pass_s
        matrices_s = sum(self.matrix_s(tokens, n, k, kind) for n, k in widths)
        if has_experts:
            matrices_s += self.experts_s(of, tokens, num_devices)
        sums_s = 2 * self.sums.seconds(num_devices, tokens * of.hidden) if num_devices > 1 else 0.0
        return of.num_layers * (matrices_s + attention_s + between_s + sums_s)


_SUMS = "custom_allreduce"  # of what several devices computed
_OPTIONAL = (_SUMS, "moe")  # a copy may lack them
_TABLES = ("gemm", "context_attention", "generation_attention", "encoder_attention", *_OPTIONAL)


def load_silicon(folder: Path, device: str, backend: str = "vllm", products: str = _TYPE) -> Silicon:
    """Reads a user's copy of the tables, the newest version of each. Raises RequestError.

    folder: the repository, or any folder in it that holds the systems
    device: of SYSTEMS, or a system's own name
    products: type of the language model's matrix products
    """
    if products not in PRODUCTS:
        raise RequestError(f"received products of {products!r}; allowed: {', '.join(PRODUCTS)}; name one")
    if backend not in BACKENDS:
        raise RequestError(f"received the backend {backend!r}; allowed: {', '.join(BACKENDS)}; name one")
    system = SYSTEMS.get(device, device)
    spec = next(folder.rglob(f"{system}.yaml"), None) if re.fullmatch(r"[a-z0-9_]+", system) else None
    if spec is None:
        raise RequestError(
            f"received '{folder}' and the device {device!r}; allowed: a copy of AIConfigurator's systems "
            f"with one of {', '.join(SYSTEMS)}; clone github.com/ai-dynamo/aiconfigurator and name its folder"
        )
    try:
        described = yaml.safe_load(spec.read_text(encoding="utf-8"))
        gpu, node = described["gpu"], described["node"]
        known = DEVICES.get(device)
        on = Device(
            tflops=float(gpu["bfloat16_tc_flops"]) / 1e12,
            memory_gb=float(gpu["mem_capacity"]) / 1e9,
            bandwidth_gb_s=float(gpu["mem_bw"]) / 1e9,
            link_gb_s=float(node["intra_node_bw"]) / 1e9,
            power_w=float(gpu["power"]),
            price_per_hour=known.price_per_hour if known else 1.0,
            cores=known.cores if known else 24,
        )
        shares = float(gpu.get("mem_bw_empirical_scaling_factor", 0.8))
        pass_s = float(gpu.get("mem_empirical_constant_latency", 3e-6))
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise RequestError(
            f"received '{spec}', whose {' '.join(str(error).split())[:80]} is missing or wrong; allowed: a "
            "system of AIConfigurator; clone it again"
        ) from None
    data = spec.parent / "data" / system
    found = {name: newest(data, f"{name}_perf", backend, is_optional=name in _OPTIONAL) for name in _TABLES}
    tables = {name: (path.parent.name, list(read(path))) for name, path in found.items() if path}
    return Silicon(f"{system}, {backend}", products, on, on.memory_bytes_per_s * shares, pass_s, tables)


def silicon_profile(silicon: Silicon, device: str, model: str, launch_s: float = LAUNCH_S) -> Profile:
    """Returns the profile of a model on a device by measured kernels.

    Raises RequestError for recurrent layers, heads of two sizes, and experts of sizes that the tables lack.

    launch_s: that the host takes to launch a layer of prefill or of the tower
    """
    of = model_named(model)
    windowed, is_recurrent = of.language.windowed, of.language.delta is not None
    if is_recurrent or (windowed.num_layers and windowed.head_dim != of.language.head_dim):
        raise RequestError(
            f"received {of.name}, which has {'recurrent layers' if is_recurrent else 'heads of two sizes'}; "
            f"allowed: models without; take --profile {of.name}@{device}"
        )
    try:
        encode = _launched(
            "patches", "groups", [_encode(silicon, of.vision, each) for each in _PATCHES], of.vision, launch_s
        )
        prefill, decode = _language(silicon, of.language, 1, launch_s)
        degrees = _degrees(silicon, of.language)
        shared = {each: _language(silicon, of.language, each, launch_s) for each in degrees}
    except (KeyError, ValueError) as error:
        raise RequestError(
            f"received tables of {silicon.system} with a wrong column or value ({error}); allowed: those of "
            "AIConfigurator; copy them again"
        ) from None
    is_small = PRODUCTS[silicon.products] < PRODUCTS[_TYPE]
    devices = Devices({device: silicon.device})
    base = analytic_profile(device, model, devices=devices, quantization="fp8" if is_small else None)
    versions = ", ".join(f"{name} {version}" for name, (version, _) in silicon.tables.items())
    told = (
        f"sums of kernels that AIConfigurator measured on {silicon.system} ({versions}), products of the "
        f"language model in {silicon.products}",
        f"products at {_SUSTAINED:.0%} of the data sheet's FLOPs or less, {launch_s * 1e3:.2f} ms a layer or "
        "more to launch prefill and towers: measured on one H100",
        *(each for each in base.assumptions[3:] if each != AS_FAST_IN_FP8),
    )
    encode = replace(encode, valid_items=base.encode.valid_items)
    parallel = None if base.parallel is None else replace(base.parallel, shared=shared)
    is_on_load = silicon.products == "fp8" and of.language.num_experts == 1
    return replace(
        base,
        quantization="fp8" if is_on_load else None,
        encode=encode,
        prefill=prefill,
        decode=decode,
        assumptions=told,
        parallel=parallel,
    )


_Point = tuple[float, float, float]


def _launched(
    units: str, items: str, points: Sequence[_Point], of: Transformer, launch_s: float
) -> StageTable:
    """Fits points, none of which is shorter than the launches of its layers."""
    least_s = of.num_layers * launch_s
    points = [(count, counted, max(seconds, least_s)) for count, counted, seconds in points]
    return fit_roofline(units, items, [Measurement(*point, 0.0, 1) for point in points])


def _degrees(silicon: Silicon, of: Transformer) -> list[int]:
    """Returns by how many devices the tables know how to share heads out."""
    known = (int(each) for each in silicon.sums.points)
    return [each for each in known if of.num_heads % each == of.num_kv_heads % each == 0]


def _language(
    silicon: Silicon, whole: Transformer, num_devices: int, launch_s: float
) -> tuple[StageTable, StageTable]:
    """Returns the costs of prefill, and of replayed steps, where each device has its heads of every layer."""
    of = replace(
        whole,
        num_heads=whole.num_heads // num_devices,
        num_kv_heads=whole.num_kv_heads // num_devices,
        mlp_hidden=whole.mlp_hidden if whole.num_experts > 1 else whole.mlp_hidden // num_devices,
        vocabulary=whole.vocabulary // num_devices,
    )
    prefill = [_prefill(silicon, of, each, num_devices) for each in _NEW_TOKENS]
    steps = [_decode(silicon, of, *each, num_devices) for each in product(_SEQUENCES, _CONTEXTS)]
    return _launched("new tokens", "token pairs", prefill, of, launch_s), _replayed(steps, of)


def _replayed(steps: Sequence[_Point], of: Transformer) -> StageTable:
    """Fits steps, which read of experts what their sequences choose."""
    points = [Measurement(*point, 0.0, 1) for point in steps]
    if of.num_experts == 1:
        return fit_roofline("sequences", "context tokens", points)
    return fit_experts("sequences", "context tokens", points, of.num_active_experts / of.num_experts)


def _encode(silicon: Silicon, of: Transformer, patches: int) -> _Point:
    attended = min(patches, of.attended or patches)
    attention_s = silicon.attention_s("encoder_attention", of, max(1.0, patches / attended), attended)
    return patches, 0, silicon.layers_s(of, patches, attention_s)


def _prefill(silicon: Silicon, of: Transformer, tokens: int, num_devices: int) -> _Point:
    attention_s = silicon.attention_s("context_attention", of, 1, tokens)
    head_s = silicon.matrix_s(1, of.vocabulary, of.hidden)
    layers_s = silicon.layers_s(of, tokens, attention_s, silicon.products, num_devices)
    return tokens, tokens * (tokens + 1) / 2, layers_s + head_s


def _decode(silicon: Silicon, of: Transformer, sequences: int, context: int, num_devices: int) -> _Point:
    attention_s = silicon.attention_s("generation_attention", of, sequences, context)
    head_s = silicon.matrix_s(sequences, of.vocabulary, of.hidden)
    layers_s = silicon.layers_s(of, sequences, attention_s, silicon.products, num_devices)
    return sequences, sequences * context, layers_s + head_s
