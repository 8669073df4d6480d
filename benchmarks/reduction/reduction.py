"""What fewer visual tokens save: time to the first token, frames that fit; and what they cost in accuracy.

    python -m benchmarks.reduction.reduction [--quick] [--section NAME]
        [--verdicts FILE ...] [--stories FILE ...] [--same-tokens FEW MANY ...] [--whole FILE ...]

prefill: a drawn video whose embeddings are there and a question, in one request; each setting in turn, CPU
time of the one thread, in its parts. The gain in TTFT beside the gain in operations of the decoder, as they
are measured (reduction_costs.py).
fit: the most frames of one video that a fixed room for keys and values admits.
accuracy: the tables of `epd eval --out FILE.jsonl`, from the files given, beside times to the first token of
the section above and what `reduction_costs.py` has counted, from the files of results; rows
of settings that no file has, or of fewer questions, stay.
stories: such files of `training.drawn_eval --stories`: its one-word kinds, its other short answers, and what
it describes.
same-tokens: such files of the same videos, in pairs: few frames in full, many frames that are reduced.
whole: such files of mustdrop with its merging in the tower, one for each number of frames F, made by

    epd eval --demo 1000 --seed 11 --frames F --per-kind 2 --model shapes-vl --method mustdrop \\
        --retention 0.5 --retention 0.25 --retention 0.1 --retention 0.078 --ttft-videos 0 --out FILE

beside the rows of `accuracy`, which were measured with --tower-share 1, and what `reduction_costs.py` counts.
Results go to benchmarks/results/reduction.{json,md}.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.reduction.reduction_costs import (
    ALL_TOKENS,
    QUESTION,
    embedded_pipeline,
    encoded_video,
    prompt_costs,
)
from benchmarks.reporting import RESULTS, Row, Section, median_ratio, run_sections, setting
from epd.encoders import FrameSampling, VideoFacts
from epd.encoders.groups import prompt_identity
from epd.encoders.reduction import reduce_prompt
from epd.engine_config import EngineConfig
from epd.eval.items import FULL
from epd.eval.rows import EvalRow, Pairs, PartAccuracy, RowSelection, by_setting, eval_rows, mcnemar_p
from epd.eval.verdicts import Verdict, VerdictLog
from epd.models import embedded_model_path
from epd.reduction import METHODS, ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.shapes.questions import ONE_WORD_KINDS
from epd.stages.encode.encoder_pool import EmbeddingSplicer
from epd.stages.engine.generation import GenerateRequest
from tests.colocated import ColocatedPipeline, EncodedMedia
from training.stories import TOLD_KINDS

RETENTIONS = (1.0, 0.5, 0.25, 0.2, 0.15, 0.1, 0.078)
FRAMES = (32, 128, 512)
KV_TOKENS = 4096
MOST_FRAMES = 16384
Key: TypeAlias = tuple[int, str, float]  # frames, method, retention
# Columns of benchmarks.reduction.reduction_costs that stand beside accuracy.
COSTS = (
    "fewer_in_prompt",
    "fewer_in_all",
    "kv_blocks_prefill",
    "kv_blocks_decode",
    "sent_to_prefill_mb",
    "sent_to_decode_mb",
)
WHOLE_COSTS = ("fewer_in_tower", "fewer_in_prompt", "fewer_in_all", "kv_blocks_at_most", "kv_blocks_decode")


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Holds the CPU seconds of the one thread from embeddings that are there to a question's first token.

    plan_s: the prompt laid out and named, and the request added.
    choice_s: which tokens are kept. passes_s: the engine's steps, as large as can be.
    """

    plan_s: float
    choice_s: float
    passes_s: float

    @property
    def total_s(self) -> float:
        return self.plan_s + self.choice_s + self.passes_s


@torch.inference_mode()
def first_token(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, policy: ReductionPolicy, name: str
) -> FirstToken:
    """Answers a question with one token, as a prefill worker does; name: of request and video, never used."""
    engine, start = pipeline.engine, time.thread_time()
    plan = reduce_prompt(pipeline.adapter.plan_prompt(encoded.plans, QUESTION), policy)
    engine.add(GenerateRequest(name, plan, prompt_identity(plan, [name]), SamplingParams(max_tokens=1)))
    planned, splicer = time.thread_time(), EmbeddingSplicer(pipeline.adapter, plan)
    for group in encoded.groups:
        placed = splicer.push(*group)
        if placed is not None:
            engine.add_embeddings(name, placed)
    chosen = time.thread_time()
    while not engine.step().outputs:
        pass
    return FirstToken(planned - start, chosen - planned, time.thread_time() - chosen)


def prefill_rows(methods: Sequence[str], num_frames: int, repeats: int) -> list[Row]:
    pipeline, model = embedded_pipeline()
    encoded = encoded_video(pipeline, num_frames)
    policies = [ReductionPolicy()]
    policies += [ReductionPolicy(method, r) for method in methods for r in RETENTIONS if r < 1]
    taken: dict[ReductionPolicy, list[FirstToken]] = {policy: [] for policy in policies}
    for repeat in range(repeats + 1):
        for number, policy in enumerate(policies):
            once = first_token(pipeline, encoded, policy, f"{repeat} {number}")
            if repeat:  # the first is to warm up
                taken[policy].append(once)
    operations = [
        prompt_costs(pipeline, model, encoded, QUESTION, policy).decoder_flops for policy in policies
    ]
    whole_prompt = pipeline.adapter.plan_prompt(encoded.plans, QUESTION)
    return [
        {
            "frames": num_frames,
            "method": policy.method if policy.is_on else ALL_TOKENS,
            "retention": policy.retention,
            "visual_tokens": reduce_prompt(whole_prompt, policy).num_visual_tokens,
        }
        | time_columns(taken[policy], taken[policies[0]], operations[0] / flops)
        for policy, flops in zip(policies, operations, strict=True)
    ]


def time_columns(taken: Sequence[FirstToken], whole: Sequence[FirstToken], flops_gain: float) -> Row:
    """Medians over repeats; gains are against all tokens in the same repeat."""
    gain = median_ratio([each.total_s for each in whole], [each.total_s for each in taken])
    of_passes = median_ratio([each.passes_s for each in whole], [each.passes_s for each in taken])
    return {
        "plan_ms": round(1e3 * statistics.median(each.plan_s for each in taken), 1),
        "choice_ms": round(1e3 * statistics.median(each.choice_s for each in taken), 1),
        "passes_ms": round(1e3 * statistics.median(each.passes_s for each in taken), 1),
        "ttft_s": round(statistics.median(each.total_s for each in taken), 3),
        "flops_gain": round(flops_gain, 2),
        "ttft_gain": round(gain, 2),
        "share_of_flops_gain": round(gain / flops_gain, 2),
        "of_passes_alone": round(of_passes / flops_gain, 2),
        "repeats": len(taken),
    }


def fit_rows(num_kv_tokens: int) -> list[Row]:
    """For each retention the most frames of one video that are admitted with a question and its answer."""
    pipeline = ColocatedPipeline.load(
        embedded_model_path(), EngineConfig(num_threads=1, num_kv_tokens=num_kv_tokens)
    )
    rows: list[Row] = []
    for retention in RETENTIONS:
        policy = ReductionPolicy(retention=retention)
        most = bisect.bisect_left(range(1, MOST_FRAMES), x=True, key=lambda n: not fits(pipeline, n, policy))
        rows.append({"retention": retention, "kv_tokens": num_kv_tokens, "frames": most})
        rows[-1]["times_as_many"] = round(most / rows[0]["frames"], 2)
    return rows


def fits(pipeline: ColocatedPipeline, num_frames: int, policy: ReductionPolicy) -> bool:
    facts = VideoFacts(num_frames, 1.0, 360, 640)
    plan = pipeline.adapter.plan_video(facts, FrameSampling(num_frames=num_frames))
    prompt = reduce_prompt(pipeline.adapter.plan_prompt([plan], QUESTION), policy)
    sampling = SamplingParams(max_tokens=16)
    return pipeline.engine.can_admit(
        GenerateRequest("fit", prompt, prompt_identity(prompt, ["video"]), sampling)
    )


def accuracy_rows(logs: Sequence[Path]) -> list[Row]:
    """Returns what `epd eval` says of its logs of verdicts, and what the same settings cost."""
    shown = {
        (row["frames"], row["method"], row["retention"]): row
        for row in stored("reduction").get("accuracy", [])
    }
    for key, row in logged_rows(logs):
        found = accuracy_row(key, row)
        shown[key] = max(found, shown.get(key, found), key=lambda each: each["questions"])
    times, costs = seconds_to_first_token(), counted_costs()
    return [shown[key] | {"ttft_s": times.get(key)} | costs.get(key, {}) for key in in_order(shown)]


def logged_rows(logs: Sequence[Path]) -> Iterator[tuple[Key, EvalRow]]:
    """Yields the rows that `epd eval --table LOG --json` prints."""
    for log in map(VerdictLog.read, logs):
        for row in eval_rows(log, RowSelection.of(log)):
            method = row.method if row.retention < 1 else ALL_TOKENS
            yield (row.num_frames, method, row.retention), row


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Returns settings by frames, then method, then from most to fewest tokens."""
    order = {name: number for number, name in enumerate((ALL_TOKENS, *METHODS))}
    return sorted(keys, key=lambda key: (key[0], order[key[1]], -key[2]))


def story_rows(logs: Sequence[Path]) -> list[Row]:
    """Returns a row for each setting, with the accuracy of kinds of questions, and the F1 of facts."""
    rows = {key: story_row(key, row) for key, row in logged_rows(logs)}
    return [rows[key] for key in in_order(rows)]


def story_row(key: Key, row: EvalRow) -> Row:
    """row: of questions of all kinds that `--stories` asks."""
    frames, method, retention = key
    kinds = {kind.name: kind for kind in row.kinds}
    others = kinds.keys() - {*ONE_WORD_KINDS, *TOLD_KINDS}
    told = [kinds[kind] for kind in TOLD_KINDS]
    return {
        "frames": frames,
        "method": method,
        "retention": retention,
        "visual_tokens": row.visual_tokens,
        **share("one_word", [kinds[kind] for kind in ONE_WORD_KINDS if kind in kinds]),
        **share("other_short", [kinds[kind] for kind in others]),
        **share("descriptions", told),
        **{f"f1_{kind.name}": kind.facts_f1 and round(kind.facts_f1, 4) for kind in told},
    }


def share(name: str, kinds: Sequence[PartAccuracy]) -> Row:
    """Returns how many questions of some kinds were asked, and the share answered right."""
    asked = sum(kind.num_questions for kind in kinds)
    right = sum(kind.num_questions * kind.accuracy for kind in kinds)
    return {f"{name}_asked": asked, name: round(right / asked, 4)}


def accuracy_row(key: Key, row: EvalRow) -> Row:
    frames, method, retention = key
    return {
        "frames": frames,
        "questions": row.num_questions,
        "method": method,
        "retention": retention,
        "visual_tokens": row.visual_tokens,
        "accuracy": round(row.accuracy, 4),
        "interval": f"{row.interval.low:.3f} to {row.interval.high:.3f}",
        "of_full": None if row.relative_accuracy is None else round(row.relative_accuracy, 4),
        "p_value": None if row.p_value is None else float(f"{row.p_value:.2g}"),
    }


def seconds_to_first_token() -> dict[Key, float]:
    """Returns the section `prefill` of the results, by frames, method and retention."""
    rows = stored("reduction").get("prefill", [])
    return {(row["frames"], row["method"], row["retention"]): row["ttft_s"] for row in rows}


def whole_rows(logs: Sequence[Path]) -> list[Row]:
    """Returns what three stages of mustdrop leave together, beside what two of them do.

    ttft_s: with embeddings that are there, so of two as of three: what merges in the tower keeps as many.
    """
    two = {(row["frames"], row["method"], row["retention"]): row for row in stored("reduction")["accuracy"]}
    costs, times = counted_costs(WHOLE_COSTS), seconds_to_first_token()
    return [
        accuracy_row(key, row)
        | {"of_full_two_stages": two[key]["of_full"], "ttft_s": times.get(key)}
        | costs[key]
        for key, row in logged_rows(logs)
    ]


def counted_costs(names: Sequence[str] = COSTS) -> dict[Key, Row]:
    """Returns what benchmarks.reduction.reduction_costs has counted, by frames, method and retention."""
    sections = stored("reduction_costs")
    return {
        (frames, row["method"], row["retention"]): {name: row[name] for name in names}
        for frames in FRAMES
        for row in sections.get(f"{frames} frames", [])
        if row["compute_share"] in (None, row["retention"])
    }


def stored(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def same_tokens_rows(logs: Sequence[Path]) -> list[Row]:
    """Few frames in full beside many frames reduced to the nearest number of tokens: the same questions.

    logs: pairs, of the few and of the many frames.
    """
    rows: list[Row] = []
    for few_log, many_log in zip(logs[::2], logs[1::2], strict=True):
        few = verdicts_of(few_log, FULL.method)[0]
        groups = verdicts_of(many_log, ReductionPolicy().method)
        many = min(groups, key=lambda group: abs(num_tokens(group) - num_tokens(few)))
        pairs = Pairs.of(many, few)
        rows.append(
            {
                "questions": pairs.num_questions,
                "few_frames": few[0].num_frames,
                "their_tokens": num_tokens(few),
                "right": accuracy(few),
                "many_frames": many[0].num_frames,
                "retention": many[0].retention,
                "tokens": num_tokens(many),
                "right_of_many": accuracy(many),
                "won": pairs.wins,
                "lost": pairs.losses,
                "p_value": float(f"{mcnemar_p(pairs.wins, pairs.losses):.2g}"),
            }
        )
    return rows


def verdicts_of(log: Path, method: str) -> list[list[Verdict]]:
    """Those of a method, for each retention and number of frames."""
    groups = by_setting(VerdictLog.read(log).verdicts).items()
    found = [verdicts for (setting, _), verdicts in groups if setting.method == method]
    return found or sys.exit(f"{log} has no verdicts of {method!r}")


def accuracy(verdicts: Sequence[Verdict]) -> float:
    return round(statistics.fmean(each.is_right for each in verdicts), 4)


def num_tokens(verdicts: Sequence[Verdict]) -> int:
    """Mean number of visual tokens."""
    return round(statistics.fmean(each.visual_tokens for each in verdicts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short video, one repeat; writes nothing")
    parser.add_argument("--section", action="append", help="one or several of those above")
    parser.add_argument("--verdicts", type=Path, nargs="+", default=[], help="logs of `epd eval --out`")
    parser.add_argument("--stories", type=Path, nargs="+", default=[], help="such logs of shapes-vl-2")
    parser.add_argument("--whole", type=Path, nargs="+", default=[], help="such logs of mustdrop")
    parser.add_argument("--same-tokens", type=Path, nargs="+", default=[], help="FEW MANY, logs as above")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick = options.quick
    lengths, repeats = (FRAMES[:1], 1) if quick else (FRAMES, 3)
    sections = {
        "prefill": Section(
            "First token, embeddings there, CPU time of one thread (aim: 0.9 of the gain in operations)",
            lambda: [row for frames in lengths for row in prefill_rows(METHODS, frames, repeats)],
        ),
        "fit": Section("Frames that fit", partial(fit_rows, KV_TOKENS)),
        "accuracy": Section(
            "Accuracy on held-out videos of the shapes world", partial(accuracy_rows, options.verdicts)
        ),
        "stories": Section(
            "shapes-vl-2: one-word answers, other short ones, descriptions, and the F1 of their facts",
            partial(story_rows, options.stories),
        ),
        "same-tokens": Section(
            "The same tokens: few frames in full, or many reduced",
            partial(same_tokens_rows, options.same_tokens),
        ),
        "whole": Section("MustDrop, three stages together", partial(whole_rows, options.whole)),
    }
    needed = {
        "accuracy": options.verdicts,
        "stories": options.stories,
        "same-tokens": options.same_tokens,
        "whole": options.whole,
    }
    default = [name for name in sections if needed.get(name, True)]
    run_sections(
        "reduction",
        "Fewer visual tokens",
        sections,
        options.section or default,
        lambda: setting(("torch", "transformers"), checkpoint="shapes-vl, float32"),
        save=not quick,
        module="reduction.reduction",
    )


if __name__ == "__main__":
    main()
