"""Operations that are measured, against figures computed by hand; each method saves where it says."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.reduction.reduction_costs import counted_flops, embedded_pipeline, encoded_video, prompt_costs
from epd.reduction import ReductionPolicy
from epd.stages.decoder.linear import OneDnnLinear

QUESTION = "Which shape appears first?"


def test_products_are_counted_as_by_hand() -> None:
    rows, weight = torch.rand(3, 8), torch.rand(5, 8)
    with torch.inference_mode(), counted_flops() as counter:
        functional.linear(rows, weight)
    assert counter.get_total_flops() == 2 * 3 * 8 * 5
    with torch.inference_mode(), counted_flops() as counter:
        OneDnnLinear(weight, None, is_packed=False)(rows)
    assert counter.get_total_flops() == 2 * 3 * 8 * 5


def test_a_causal_kernel_leaves_half_of_attention_out() -> None:
    query, keys = torch.rand(1, 2, 6, 4), torch.rand(1, 2, 6, 4)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for is_causal, pairs in ((False, 36), (True, 21)):
        with torch.inference_mode(), counted_flops() as counter:
            attend(query, keys, keys, 0.0, is_causal)
        assert counter.get_total_flops() == 2 * 2 * pairs * (4 + 4)


def test_each_method_saves_where_it_says() -> None:
    pipeline, model = embedded_pipeline()
    encoded = encoded_video(pipeline, 64)
    reducing = ("balanced", "quickprefill", "fastkv", "mustdrop")
    policies = {"all": ReductionPolicy()} | {each: ReductionPolicy(each, 0.25) for each in reducing}
    costs = {
        name: prompt_costs(pipeline, model, encoded, QUESTION, policy) for name, policy in policies.items()
    }
    flops = {name: each.decoder_flops for name, each in costs.items()}
    assert flops["balanced"] < flops["fastkv"] < flops["mustdrop"] < flops["quickprefill"] < flops["all"]
    reduced = [each for name, each in costs.items() if name != "all"]
    assert len({(each.prefill_blocks, each.decode_blocks, each.handed_over_bytes) for each in reduced}) == 1
    assert reduced[0].prefill_blocks == reduced[0].decode_blocks < costs["all"].decode_blocks / 3
    sent = {name: each.encoded_bytes / costs["all"].encoded_bytes for name, each in costs.items()}
    assert sent == {"all": 1, "balanced": 0.25, "quickprefill": 1, "fastkv": 1, "mustdrop": 0.75}
    assert costs["balanced"].peak_blocks == costs["balanced"].prefill_blocks < costs["mustdrop"].peak_blocks


def test_only_a_method_that_merges_in_the_tower_saves_there() -> None:
    pipeline, _ = embedded_pipeline()
    flops = []
    for policy in (ReductionPolicy(), ReductionPolicy("balanced", 0.25), ReductionPolicy("mustdrop", 0.25)):
        with counted_flops() as tower:
            encoded_video(pipeline, 8, policy)
        flops.append(tower.get_total_flops())
    assert flops[0] == flops[1]
    assert flops[2] < 0.85 * flops[0]
