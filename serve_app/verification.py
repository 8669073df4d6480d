"""Compares a checkpoint's answers, logits and layers here with those of transformers' `generate`.

    frames   ──> our prompt, tower, layers, one by one ──┐
             ──> the processor and model of transformers ┴─> prompts, positions, layers, logits
    question ──> each topology, in this process          ──> texts

Both get the pixels that are decoded here. Both models are in memory at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from torch import Tensor

from epd import video
from epd.encoders import Adapter, Embeddings, FrameSampling, MediaPlan, PromptPlan, concatenated, load_adapter
from epd.encoders.checkpoint import published
from epd.encoders.device import device_of, to_host
from epd.encoders.groups import FrameEncoder
from epd.encoders.sampling import shown_metadata
from epd.engine_config import EngineConfig
from epd.serve_app.llm import LLM
from epd.stages.decoder.decoder import DecoderInputs
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import Segment, visual_of
from epd.stages.engine.setup import BLOCK_SIZE, kv_shape
from epd.stages.loading.weights import load_role
from epd.stages.media import plan_pixels, plan_video
from epd.stages.placement import Placement
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.types import Int64Array, ceil_div

# Of a layer's output, as a share of its largest value: what the order of sums explains.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
_FLOAT32 = EngineConfig(dtype="float32", num_kv_tokens=16_384)


@dataclass(frozen=True, slots=True)
class Question:
    """Says what is asked of each case. num_frames: of a video; None for the model's own number."""

    text: str
    num_frames: int | None
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TopologyAnswer:
    """Holds what a topology answered, and whether that is the text of `generate`."""

    topology: str
    is_equal: bool
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CaseReport:
    """Compares one case.

    is_same_prompt: token by token. has_own_positions: whether they differ from transformers', which
        then gets ours (docs/decisions/0009).
    logit_difference: the largest one, along the answer of `generate`.
    first_token: of that answer, the first that is not the likeliest here; None if all are.
    first_layer: whose output differs; -1 for the embeddings, None if none does.
    seconds: that `generate` took.
    """

    case: str
    num_prompt_tokens: int
    is_same_prompt: bool
    has_own_positions: bool
    logit_difference: float
    first_token: int | None
    first_layer: int | None
    text: str
    seconds: float
    answers: tuple[TopologyAnswer, ...] = ()

    @property
    def is_equal(self) -> bool:
        answers = all(answer.is_equal for answer in self.answers)
        return self.is_same_prompt and answers and self.first_token is None and self.first_layer is None


@dataclass(frozen=True, slots=True)
class _Medium:
    """Holds a medium. sent: what the processor of transformers gets, uint8 [N, H, W, 3]."""

    plan: MediaPlan
    frames: Tensor
    sent: Tensor


def verify(
    folder: Path,
    media: Sequence[Path] = (),
    question: str = "What is shown?",
    *,
    num_frames: int | None = 4,
    max_tokens: int = 16,
    topologies: Sequence[str] = (),
    config: EngineConfig = _FLOAT32,
) -> list[CaseReport]:
    """Compares a text alone, then a question about each medium. Raises what loading and planning do.

    num_frames: of a video; None for the model's own number. topologies: that answer too, one after the other.
    """
    asked = Question(question, num_frames, max_tokens)
    cases: list[list[Path]] = [[], *([each] for each in media)]
    comparison = Comparison(folder, asked, config)
    compared = [comparison.report(case) for case in cases]
    del comparison  # before other models are loaded
    answers: list[list[TopologyAnswer]] = [[] for _ in cases]
    for topology in topologies:
        with LLM(folder, topology=topology, **config.given) as llm:
            for case, report, found in zip(cases, compared, answers, strict=True):
                found.append(_answered(llm, topology, case, asked, report.text))
    return [replace(report, answers=tuple(found)) for report, found in zip(compared, answers, strict=True)]


def _answered(llm: LLM, topology: str, case: list[Path], question: Question, text: str) -> TopologyAnswer:
    start_s = time.perf_counter()
    answer = llm.ask(
        list(case),
        question.text,
        frames=question.num_frames if case and video.media_kind(case[0]) == "video" else None,
        max_tokens=question.max_tokens,
        temperature=0.0,
    )
    return TopologyAnswer(topology, answer.text == text, answer.text, time.perf_counter() - start_s)


class Comparison:
    """Holds a checkpoint as it is loaded here, and as transformers loads it."""

    def __init__(self, folder: Path, question: Question, config: EngineConfig) -> None:
        placement = Placement.resolve(config.device, config.dtype, folder)
        self._question = question
        self._by_modules = config.model_impl == "transformers"
        self._adapter: Adapter = load_adapter(folder, pixels=config.pixels)
        self._model: Any = load_role(folder, "whole", placement).model
        self._encoder = FrameEncoder(self._adapter, self._adapter.vision_tower(self._model))
        self._processor = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
        self._theirs: Any = (
            published()
            .reference_class(folder)
            .from_pretrained(folder, dtype=placement.dtype, local_files_only=True)
        )
        self._theirs.to(placement.device).eval()
        self._tolerance = TOLERANCES[placement.dtype]

    @torch.inference_mode()
    def report(self, case: Sequence[Path]) -> CaseReport:
        """Compares a question about media, or about none."""
        media = [self._medium(path) for path in case]
        prompt = self._adapter.plan_prompt([each.plan for each in media], self._question.text)
        inputs = self._inputs(media)
        is_same = np.array_equal(inputs["input_ids"][0].cpu().numpy(), prompt.token_ids)
        if not is_same:
            return CaseReport(_name(case), len(prompt), False, False, float("inf"), 0, -1, "", 0.0)
        has_own = self._set_positions(prompt, inputs)
        start_s = time.perf_counter()
        answer = self._generated(inputs)
        seconds = time.perf_counter() - start_s
        probe = LayerProbe.of(
            self._model, self._adapter, len(prompt) + len(answer), by_modules=self._by_modules
        )
        said = self._before_media(answer[:-1])
        segment = segment_of(prompt, self._encoded(media), said)
        layers, logits = self._their_layers(inputs, prompt, said)
        ours = to_host(probe.logits(segment, len(said) + 1)).float()
        wrong = np.flatnonzero(ours.argmax(-1).numpy() != answer[: len(said) + 1])
        return CaseReport(
            case=_name(case),
            num_prompt_tokens=len(prompt),
            is_same_prompt=True,
            has_own_positions=has_own,
            logit_difference=float((ours - logits[-len(ours) :]).abs().max()),
            first_token=int(wrong[0]) if len(wrong) else None,
            first_layer=self._first_layer(layers, lambda number: probe.hidden(segment, number)),
            text=self._adapter.tokenizer.decode(answer, skip_special_tokens=True),
            seconds=seconds,
        )

    def _medium(self, path: Path) -> _Medium:
        if video.media_kind(path) == "image":
            pixels = video.load_image(path)
            planned = plan_pixels(self._adapter, path, pixels)
            assert planned.image is not None
            return _Medium(planned.plan, planned.image, torch.from_numpy(pixels)[None])
        sampling = FrameSampling(num_frames=self._question.num_frames)
        facts = video.look(path)
        plan = plan_video(self._adapter, facts, sampling)
        # MiniCPM-V's processor could cut a frame of the planned size once more.
        resizes_again = self._theirs.config.model_type.startswith("minicpm")
        sizes = plan.size, (facts.height, facts.width) if resizes_again else plan.size
        frames, sent = (torch.from_numpy(video.decode(path, plan.times_s, each).data) for each in sizes)
        return _Medium(self._adapter.compressed(plan, [frames]), frames, sent)

    def _encoded(self, media: Sequence[_Medium]) -> Any:
        found = []
        for each in media:
            (rows,) = self._encoder.encode([self._encoder.patches(each.frames, each.plan)])
            found.append(self._adapter.join(rows, each.plan, 0, each.plan.num_units))
        return concatenated(found) if found else None

    def _inputs(self, media: Sequence[_Medium]) -> Any:
        """Calls the processor of transformers with the same pixels."""
        content = [
            *({"type": each.plan.kind} for each in media),
            {"type": "text", "text": self._question.text},
        ]
        owner = self._processor if self._processor.chat_template else self._adapter.tokenizer
        text = owner.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        begin = self._adapter.tokenizer.bos_token
        given: dict[str, Any] = {"add_special_tokens": False} if begin and text.startswith(begin) else {}
        for each in media:
            pixels = each.sent.permute(0, 3, 1, 2).contiguous()  # a copy: some processors draw on it
            nests = self._theirs.config.model_type == "smolvlm"  # a list for each prompt
            if each.plan.kind == "image":
                given["images"] = [[pixels[0]]] if nests else [pixels[0]]
                continue
            facts = [shown_metadata(each.plan.frame_indices, each.plan.source_fps)]
            given |= {"videos": [[pixels]] if nests else [pixels], "do_sample_frames": False}
            given["video_metadata"] = [facts] if nests else facts
        inputs = self._processor(text=[text], return_tensors="pt", **given)
        dtype = next(self._theirs.parameters()).dtype
        return inputs.to(device_of(self._theirs), dtype)

    def _set_positions(self, prompt: PromptPlan, inputs: Any) -> bool:
        """Gives transformers our M-RoPE positions; returns whether it would have others."""
        base = self._theirs.model
        if not hasattr(type(base), "get_rope_index"):
            return False
        vars(base).pop("get_rope_index", None)
        ours = torch.from_numpy(prompt.positions)[:, None].to(inputs["input_ids"].device)
        names = "input_ids", "mm_token_type_ids", "attention_mask", "second_per_grid_ts", "target_sizes"
        given = {
            name: value
            for name, value in inputs.items()
            if name.startswith(names) or name.endswith("grid_thw")
        }
        if "video_second_per_grid" in inputs:  # as Qwen2.5-Omni names it
            given["second_per_grids"] = inputs["video_second_per_grid"]
        theirs = base.get_rope_index(**given)[0] if len(prompt.media) else ours
        delta = torch.tensor([[prompt.next_position - len(prompt)]], device=ours.device)
        for owner in (base, self._theirs):  # `generate` of Qwen2.5-Omni asks the whole model
            vars(owner)["get_rope_index"] = lambda *_args, **_more: (ours, delta)
        return not torch.equal(theirs.to(ours), ours)

    def _before_media(self, answer: Int64Array) -> Int64Array:
        """Returns an answer up to a token that stands for media, which a forward pass would look for."""
        names = (f"{kind}_token_{end}" for kind in ("image", "video") for end in ("id", "index"))
        ids = (getattr(self._theirs.config, name, None) for name in names)
        is_media = np.isin(answer, [each for each in ids if each is not None])
        return answer[: int(is_media.argmax())] if is_media.any() else answer

    def _generated(self, inputs: Any) -> Int64Array:
        ids = self._theirs.generate(**inputs, max_new_tokens=self._question.max_tokens, do_sample=False)
        found: Int64Array = ids[0, inputs["input_ids"].shape[1] :].cpu().numpy()
        return found

    def _their_layers(
        self, inputs: Any, prompt: PromptPlan, answer: Int64Array
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the input of each layer, and of the head, [T, C] each; and the logits, float32 [T, V]."""
        decoder, found = self._theirs.get_decoder(), list[Tensor]()

        def keep(_module: Any, args: Any, kwargs: Any) -> None:
            found.append((args[0] if args else kwargs["hidden_states"])[0])

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in decoder.layers]
        hooks.append(
            decoder.register_forward_hook(lambda _module, _args, out: found.append(out.last_hidden_state[0]))
        )
        try:
            logits = self._theirs(**self._longer(inputs, prompt, answer), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return found, to_host(logits).float()

    def _longer(self, inputs: Any, prompt: PromptPlan, answer: Int64Array) -> dict[str, Any]:
        """Returns the inputs with an answer behind the prompt."""
        ids = inputs["input_ids"]
        behind = torch.from_numpy(answer)[None].to(ids)
        longer = {**inputs, "input_ids": torch.cat([ids, behind], dim=1)}
        for name in ("attention_mask", "mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"):
            if name in inputs:
                fill = torch.full_like(behind, int(name == "attention_mask"))
                longer[name] = torch.cat([inputs[name], fill], dim=1)
        if len(prompt.positions) > 1:
            positions = segment_of(prompt, None, answer).positions
            longer["position_ids"] = torch.from_numpy(positions)[:, None].to(ids.device)
        return longer

    def _first_layer(self, theirs: Sequence[Tensor], ours: Callable[[int], Tensor]) -> int | None:
        """Finds the first layer whose output differs, by halves: what differs stays different."""
        if not self._differs(theirs[-1], ours(len(theirs) - 1)):
            return None
        low, high = -1, len(theirs) - 1  # the input of `high` differs, that of `low` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._differs(theirs[middle], ours(middle)) else (middle, high)
        return high - 1

    def _differs(self, theirs: Tensor, ours: Tensor) -> bool:
        most = self._tolerance * float(theirs.abs().max())
        return float((ours.float() - theirs.float()).abs().max()) > most


def _name(case: Sequence[Path]) -> str:
    return ", ".join(path.name for path in case) or "text"


class LayerProbe(ModelRunner):
    """Runs one prompt, as far as a layer or to its logits, with a cache of its own."""

    @classmethod
    def of(cls, model: Any, adapter: Adapter, num_tokens: int, *, by_modules: bool = False) -> Self:
        """Takes a model, and room for a prompt of so many tokens. by_modules: see `ModelRunner`."""
        room = num_tokens + 2 * BLOCK_SIZE
        shape = kv_shape(model, room, max_num_seqs=1, max_chunk_tokens=room)
        return cls(model, adapter, shape.build(device=device_of(model)), by_modules=by_modules)

    @torch.inference_mode()
    def hidden(self, segment: Segment, num_layers: int) -> Tensor:
        """Returns the input of layer `num_layers`, [T, C]; of all layers, what their norm gives."""
        segments = self._segments(segment)
        packed = self.packed(segments)
        given = self._inputs(packed)
        embeds, visual = self._embedded(visual_of(segments), given)
        if num_layers == 0:
            return embeds
        plans = self._plans(packed.batches, segments)
        paged = self._caches_of(plans, self._states_of(packed))
        ids, prompt_ids = given.token_ids, self._prompt_ids(packed, given.token_ids)
        inputs = DecoderInputs(given.positions, paged, given.visual_rows, visual, None, ids, prompt_ids)
        return self._decoder.run(embeds, inputs, range(num_layers))

    def logits(self, segment: Segment, num_last: int) -> Tensor:
        """Returns the logits of the last tokens, [num_last, vocabulary]."""
        *first, last = self._segments(segment)
        return self.run(
            [*(replace(each, num_logits=0) for each in first), replace(last, num_logits=num_last)]
        )

    def _segments(self, segment: Segment) -> list[Segment]:
        """Places a prompt in the pools, in parts where visual tokens attend each other: in one pass.

        The keys of all parts are written before any part attends.
        """
        num_groups = len(self.pools.groups)
        tables = list(segment.block_tables) * num_groups
        states = None if self.pools.states is None else (None, 0, 0)
        bounds = {0, len(segment.token_ids)}
        starts: set[int] = set()
        if self.attends_both_ways and segment.visual is not None and segment.both_ways is None:
            is_start = np.diff(segment.visual.indices, prepend=-2) != 1
            starts = set(segment.visual.indices[is_start].tolist())
            bounds |= starts | {int(last) + 1 for last in segment.visual.indices[np.roll(is_start, -1)]}
        return [
            replace(
                segment,
                token_ids=segment.token_ids[start:stop],
                positions=segment.positions[:, start:stop],
                num_cached=[start] * num_groups,
                block_tables=tables,
                visual=_part(segment.visual, start, stop),
                states=states,
                both_ways=np.ones(stop - start, dtype=bool) if start in starts else segment.both_ways,
                num_prompt=max(0, min(stop, segment.num_prompt) - start),
            )
            for start, stop in pairwise(sorted(bounds))
        ]


def _part(placed: PlacedEmbeddings | None, start: int, stop: int) -> PlacedEmbeddings | None:
    """Returns the visual tokens among tokens [start, stop), if there are any."""
    if placed is None:
        return None
    first, last = np.searchsorted(placed.indices, (start, stop)).tolist()
    if first == last:
        return None
    return PlacedEmbeddings(placed.embeddings.cut(first, last), placed.indices[first:last] - start)


def segment_of(prompt: PromptPlan, visual: Embeddings | None, answer: Int64Array) -> Segment:
    """Returns a prompt, with the embeddings of all its media, and an answer behind it as one segment."""
    num_tokens = len(prompt) + len(answer)
    behind = prompt.next_position + np.arange(len(answer), dtype=np.int64)
    positions = np.broadcast_to(behind, (len(prompt.positions), len(answer)))
    placed = None
    if visual is not None:
        indices = [item.token_indices(0, len(item.units)) for item in prompt.media]
        placed = PlacedEmbeddings(visual, np.concatenate(indices))
    return Segment(
        np.concatenate([prompt.token_ids, answer]),
        np.concatenate([prompt.positions, positions], axis=1),
        [0],
        [np.arange(ceil_div(num_tokens, BLOCK_SIZE), dtype=np.int32)],
        placed,
        both_ways=None if prompt.both_ways is None else np.pad(prompt.both_ways, (0, len(answer))),
        num_prompt=len(prompt),
    )
