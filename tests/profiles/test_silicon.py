"""Profiles from tables of kernels: hand-made ones that follow a known law, and files that are wrong.

Modules: `epd/profiles/silicon_tables.py`.
"""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from epd.errors import RequestError
from epd.profiles.catalogue import model_named
from epd.profiles.files import dump_profile, load_profile, parse_profile
from epd.profiles.silicon import Silicon, load_silicon, silicon_profile
from epd.profiles.silicon_tables import Grid
from epd.serve_app.cli.program import app

# Of the made-up device: seconds of a multiplication, and of a pair of tokens in one head of 128.
PER_PRODUCT_S, PER_PAIR_S = 1e-14, 1e-11
EXPERT_S = 8 * 3 * 2048 * 768 * PER_PRODUCT_S / 2  # of a token, whose products are of 8 bits
LAUNCH_S = 18.21e-3 / 28  # of a layer: our H100's prefill of 256 tokens, benchmarks/results/gpu.md
YAML = """
gpu: {mem_bw: 1.0e15, mem_bw_empirical_scaling_factor: 1.0, mem_empirical_constant_latency: 0.0,
  mem_capacity: 8.0e10, bfloat16_tc_flops: 9.0e14, power: 700}
node: {intra_node_bw: 4.5e11}
"""


def gemm() -> list[dict[str, Any]]:
    sizes = (64, 512, 4096, 32_768)
    return [
        {"gemm_dtype": kind, "m": m, "n": n, "k": k, "latency": 1000 * PER_PRODUCT_S * m * n * k * factor}
        for m, n, k in product((1, 16, 1024, 32_768), sizes, sizes)
        for kind, factor in (("bfloat16", 1), ("fp8", 0.5))
    ]


def experts(read_s: float) -> list[dict[str, Any]]:
    """Of qwen3-vl-30b-a3b: reads those of 128 that each token draws evenly, and multiplies 8 of them."""
    sizes = {"hidden_size": 2048, "inter_size": 768, "topk": 8, "num_experts": 128, "moe_ep_size": 1}
    sizes |= {"moe_dtype": "fp8", "distribution": "power_law_1.01"}
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8192, 16_384]
    return [
        {**sizes, "moe_tp_size": devices, "num_tokens": count, "latency": 1000 * seconds / devices}
        for devices, count in product((1, 2, 4), counts)
        for seconds in [read_s * (1 - (1 - 8 / 128) ** count) + EXPERT_S * count]
    ]


def attention(name: str) -> list[dict[str, Any]]:
    lengths = (1, 64, 1024, 8192, 65_536)
    is_step, is_tower = name == "generation", name == "encoder"
    rows = []
    for batch, length, heads in product((1, 8, 128), lengths, (8, 32)):
        pairs = batch * length * (1 if is_step else length)
        row = {"batch_size": batch, "isl": 1 if is_step else length, "num_heads": heads, "head_dim": 128}
        row |= {"attn_dtype": "bfloat16", "latency": 1000 * PER_PAIR_S * pairs * heads}
        if is_step:
            row["step"] = length - 1
        if not is_tower:
            row |= {"kv_cache_dtype": "bfloat16", "num_key_value_heads": heads // 8, "window_size": 0}
        rows.append(row)
    return rows


def sums(sum_s: float) -> list[dict[str, Any]]:
    return [
        {
            "num_gpus": devices,
            "message_size": size,
            "latency": 1000 * sum_s * devices,
            "backend": "vllm_graph",
        }
        for devices, size in product((2, 4, 8), (128, 2**29))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(rows), path)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def tables(folder: Path, suffix: str = ".txt") -> Path:
    data = folder / "systems" / "data" / "h100_sxm"
    (folder / "systems").mkdir()
    (folder / "systems" / "h100_sxm.yaml").write_text(YAML, encoding="utf-8")
    new, old = "vllm/0.10.0", "vllm/0.9.1"
    write(data / "gemm" / new / f"gemm_perf{suffix}", gemm())
    for name in ("context", "generation", "encoder"):
        room = "encoder_attention" if name == "encoder" else "attention"
        write(data / room / new / f"{name}_attention_perf{suffix}", attention(name))
    write(data / "gemm" / old / "gemm_perf.txt", [{**each, "latency": 1e9} for each in gemm()[:2]])
    return folder


@pytest.fixture
def silicon(tmp_path: Path) -> Silicon:
    return load_silicon(tables(tmp_path), "h100")


def test_a_matrix_between_those_of_the_table_costs_by_its_products(silicon: Silicon) -> None:
    for m, n, k in ((1, 64, 64), (100, 3584, 3584), (5000, 37_888, 3584), (65_536, 512, 512)):
        assert silicon.matrix_s(m, n, k) == pytest.approx(PER_PRODUCT_S * m * n * k, rel=1e-6)


def test_attention_is_of_the_nearest_heads(silicon: Silicon) -> None:
    language = model_named("qwen2.5-vl-7b").language  # 28 heads, of which the table has 32
    pairs = 1000 * 1000
    found = silicon.attention_s("context_attention", language, 1, 1000)
    assert found == pytest.approx(PER_PAIR_S * pairs * 28, rel=1e-6)
    found = silicon.attention_s("generation_attention", language, 16, 3000)
    assert found == pytest.approx(PER_PAIR_S * 16 * 3000 * 28, rel=1e-6)


def test_a_profile_is_the_sum_of_its_kernels(silicon: Silicon) -> None:
    """By a law without overheads: multiplications of the model, and pairs of its attention."""
    found, of = silicon_profile(silicon, "h100", "qwen2.5-vl-7b"), model_named("qwen2.5-vl-7b")
    language, vision = of.language, of.vision

    def products(stack: Any) -> float:
        attention = stack.hidden * stack.head_dim * (2 * stack.num_heads + 2 * stack.num_kv_heads)
        return stack.num_layers * (attention + stack.mlp_matrices * stack.hidden * stack.mlp_hidden)

    head = language.vocabulary * language.hidden
    pair_s = PER_PAIR_S * language.num_layers * language.num_heads
    expected = PER_PRODUCT_S * (4000 * products(language) + head) + pair_s * 4000 * 4000
    assert expected > 3 * language.num_layers * LAUNCH_S
    assert found.prefill.cost.seconds(4000, 4000 * 4001 / 2) == pytest.approx(expected, rel=0.02)
    expected = PER_PRODUCT_S * 32 * (products(language) + head) + pair_s * 32 * 2048
    assert found.decode.cost.seconds(32, 32 * 2048) == pytest.approx(expected, rel=0.02)
    width = vision.head_dim / 128
    tower_s = PER_PRODUCT_S * 16_384 * products(vision)
    tower_s += PER_PAIR_S * vision.num_layers * vision.num_heads * width * 16_384 * vision.attended
    assert found.encode.cost.seconds(16_384, 4) == pytest.approx(tower_s, rel=0.03)
    assert "gemm 0.10.0" in found.assumptions[0]  # the newest, not by letters
    assert found.memory.device_bytes == 80 * 10**9
    assert found.media == load_profile("qwen2.5-vl-7b@h100").media


def test_several_devices_have_the_kernels_of_their_shares_and_the_sums_of_the_table(tmp_path: Path) -> None:
    """Of a step, matrices that take as long for any number of rows halve; what is between them stays."""
    folder = tables(tmp_path)
    data = folder / "systems" / "data" / "h100_sxm"
    rows = [{**each, "latency": 1e-9 * each["n"] * each["k"]} for each in gemm()]
    write(data / "gemm" / "vllm" / "0.10.0" / "gemm_perf.txt", rows)
    write(data / "comm" / "vllm" / "0.10.0" / "custom_allreduce_perf.txt", sums(20e-6))
    spec = folder / "systems" / "h100_sxm.yaml"
    spec.write_text(YAML.replace("constant_latency: 0.0", "constant_latency: 5.0e-6"), encoding="utf-8")
    one = silicon_profile(load_silicon(folder, "h100"), "h100", "qwen2.5-vl-7b")
    step_s = one.decode.cost.seconds(1, 1)
    between_s = 28 * 6 * 5e-6  # six passes over memory in each layer
    for devices in (2, 4):
        shared_s = one.on(devices).decode.cost.seconds(1, 1)
        expected = (step_s - between_s) / devices + between_s + 56 * 20e-6 * devices
        assert shared_s == pytest.approx(expected, rel=0.01)
    assert one.parallel is not None
    assert list(one.parallel.shared) == [2, 4]  # four heads of keys are not for eight
    assert parse_profile(dump_profile(one)).on(2) == one.on(2)


def test_without_a_table_of_sums_they_are_computed(silicon: Silicon) -> None:
    """28 layers, two sums each of 15 us."""
    one = silicon_profile(silicon, "h100", "qwen2.5-vl-7b")
    assert one.on(2).decode.cost.fixed_s == pytest.approx(one.decode.cost.fixed_s + 56 * 15e-6)


def test_a_pass_is_not_faster_than_its_launches_and_a_product_not_than_a_device_goes_on(
    tmp_path: Path,
) -> None:
    """A table ten times as fast as the device can go on, of which prefill reaches 656 of 989 TFLOP/s."""
    folder = tables(tmp_path)
    rows = [{**each, "latency": each["latency"] / 100} for each in gemm()]
    write(folder / "systems" / "data" / "h100_sxm" / "gemm" / "vllm" / "0.10.0" / "gemm_perf.txt", rows)
    fast = load_silicon(folder, "h100")
    assert fast.matrix_s(4096, 4096, 4096) == pytest.approx(2 * 4096**3 / (0.66 * 900e12))
    found = silicon_profile(fast, "h100", "qwen2.5-vl-7b")
    assert found.prefill.cost.seconds(1, 1) == pytest.approx(28 * LAUNCH_S)
    assert found.encode.cost.seconds(1, 1) == pytest.approx(32 * LAUNCH_S)
    assert found.decode.cost.seconds(1, 1) < LAUNCH_S  # steps are replayed
    unlaunched = silicon_profile(fast, "h100", "qwen2.5-vl-7b", launch_s=0.0)
    assert unlaunched.prefill.cost.seconds(1, 1) < LAUNCH_S


def test_experts_in_8_bits_are_read_as_tokens_choose_them(tmp_path: Path) -> None:
    """48 layers. What is beside experts is known from a table of experts that take no time."""
    folder, profiles = tables(tmp_path), []
    for read_s in (1e-3, 0.0):
        rows = [{**each, "latency": each["latency"] if read_s else 1e-9} for each in experts(read_s)]
        write(folder / "systems" / "data" / "h100_sxm" / "moe" / "vllm" / "0.10.0" / "moe_perf.txt", rows)
        silicon = load_silicon(folder, "h100", products="fp8")
        profiles.append(silicon_profile(silicon, "h100", "qwen3-vl-30b-a3b", launch_s=0.0))
    found, beside = profiles
    for devices, number in product((1, 2, 4), (1, 8, 32, 128)):
        one, other = (each.on(devices).decode.cost.seconds(number, number * 2048) for each in (found, beside))
        expected = 48 * (1e-3 * (1 - (1 - 8 / 128) ** number) + EXPERT_S * number) / devices
        assert one - other == pytest.approx(expected, rel=0.03)
    assert found.decode.cost.active_share == 8 / 128
    one, other = (each.prefill.cost.seconds(8192, 8192 * 8193 / 2) for each in profiles)
    assert one - other == pytest.approx(48 * (1e-3 + EXPERT_S * 8192), rel=0.05)


def test_weights_and_products_of_8_bits_are_halved_and_heads_and_towers_are_not(tmp_path: Path) -> None:
    folder, of = tables(tmp_path), model_named("qwen2.5-vl-7b").language
    wide, narrow = (
        silicon_profile(load_silicon(folder, "h100", products=kind), "h100", "qwen2.5-vl-7b")
        for kind in ("bfloat16", "fp8")
    )
    assert (wide.quantization, narrow.quantization) == (None, "fp8"), "so a plan serves with it"
    assert not any("none has been measured" in each for each in narrow.assumptions)
    in_vocabulary = 2 * of.vocabulary * of.hidden
    saved = wide.memory.language_weight_bytes - narrow.memory.language_weight_bytes
    assert saved == of.num_parameters - in_vocabulary
    assert (narrow.encode, narrow.decode.cost.per_item_s) == (
        wide.encode, pytest.approx(wide.decode.cost.per_item_s, rel=0.01)
    )  # fmt: skip
    products_s = PER_PRODUCT_S * saved / 2 * 8192
    gained_s = wide.prefill.cost.seconds(8192, 1) - narrow.prefill.cost.seconds(8192, 1)
    assert gained_s == pytest.approx(products_s, rel=0.02)
    with pytest.raises(RequestError, match="allowed: bfloat16, fp8, fp8_block"):
        load_silicon(folder, "h100", products="int3")


def test_parquet_and_text_give_the_same(silicon: Silicon, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    again = load_silicon(tables(other, ".parquet"), "h100_sxm")
    one, two = (silicon_profile(each, "h100", "qwen3-vl-8b") for each in (silicon, again))
    assert (one.encode, one.prefill, one.decode) == (two.encode, two.prefill, two.decode)


def test_beyond_a_table_latency_grows_in_proportion_and_below_it_does_not_fall() -> None:
    grid = Grid.of([(1, 10, 1.0), (1, 100, 10.0), (4, 10, 4.0), (4, 100, 40.0), (4, 100, 50.0)])
    assert grid.seconds(1, 1000) == pytest.approx(100.0)
    assert grid.seconds(1, 1) == pytest.approx(1.0)
    assert grid.seconds(2, 31.6227766) == pytest.approx(2 * 3.16227766)
    assert grid.seconds(8, 100) == pytest.approx(80.0)


def test_the_command_writes_a_profile_that_others_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    app(["profile", "import", str(tables(tmp_path)), "--out", str(out)], standalone_mode=False)
    assert "AIConfigurator measured on h100_sxm" in capsys.readouterr().out
    assert load_profile(str(out)).prefill.error < 0.05


@pytest.mark.parametrize(
    ("device", "backend", "told"),
    [
        ("h200", "vllm", "with one of a100-80gb, h100"),
        ("../x", "vllm", "with one of"),
        ("h100", "sglang", "no gemm_perf of sglang"),
        ("h100", "tgi", "allowed: vllm, sglang, trtllm"),
    ],
)
def test_what_the_copy_lacks_is_said(tmp_path: Path, device: str, backend: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        load_silicon(tables(tmp_path), device, backend)


def test_wrong_files_and_models_with_experts_are_refused(silicon: Silicon, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"moe has no rows of .* num_experts 128"):
        silicon_profile(silicon, "h100", "qwen3-vl-30b-a3b")
    with pytest.raises(RequestError, match="has recurrent layers"):
        silicon_profile(silicon, "h100", "qwen3.5-0.8b")
    with pytest.raises(RequestError, match="has heads of two sizes"):
        silicon_profile(silicon, "h100", "gemma-4-31b")
    broken = tmp_path / "systems" / "data" / "h100_sxm" / "gemm" / "vllm" / "0.11.0" / "gemm_perf"
    write(broken.with_suffix(".txt"), [{"gemm_dtype": "bfloat16", "m": "x", "n": 1, "k": 1, "latency": 1}])
    with pytest.raises(RequestError, match="wrong column or value"):
        silicon_profile(load_silicon(tmp_path, "h100"), "h100", "qwen2.5-vl-7b")
    broken.with_suffix(".txt").unlink()
    broken.with_suffix(".parquet").write_bytes(b"no parquet")
    pytest.importorskip("pyarrow")
    with pytest.raises(RequestError, match="cannot be read"):
        load_silicon(tmp_path, "h100")
    (tmp_path / "systems" / "h100_sxm.yaml").write_text("gpu: {}", encoding="utf-8")
    with pytest.raises(RequestError, match="missing or wrong"):
        load_silicon(tmp_path, "h100")
