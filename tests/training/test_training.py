"""The training of shapes-vl runs end to end on a few clips, resumes, and gives a checkpoint that loads."""

from __future__ import annotations

import datetime
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Tokenizer

from epd.errors import RequestError
from epd.models import embedded_model_path
from epd.shapes import Question, QuestionKind
from tests import ROOT
from training import clips, language, vision
from training.batches import Prompts, ask, make_batch
from training.checkpoint import build_config, build_tokenizer
from training.clips import HELD_OUT_SEED, Clip, is_resolved, read_shard
from training.encoded import EncodedClip, crop, encode_shard
from training.loop import Progress, Training, until_s
from training.rows import NO_TARGET, Tally, answers_loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny shards of clips: one of 4 frames, one of 8."""
    path = tmp_path_factory.mktemp("clips")
    for number, num_frames in enumerate((4, 8)):
        clips.write_shard(path, number, num_frames, shard_frames=32)
    return path


@pytest.fixture(scope="module")
def drawn(folder: Path) -> list[Clip]:
    return [clip for spec in sorted(folder.glob("*.json")) for clip in read_shard(spec)]


def test_clips_come_back_from_disk_and_show_what_their_scenes_say(drawn: list[Clip]) -> None:
    assert {len(clip.frames) for clip in drawn} == {4, 8}
    for clip in drawn:
        assert clip.frames.shape[1:] == (84, 140, 3)
        assert is_resolved(clip.scene, len(clip.frames))
        assert clip.scene.seed < HELD_OUT_SEED


def test_a_share_of_the_clips_is_filmed_and_the_others_stay(
    tmp_path: Path, folder: Path, drawn: list[Clip]
) -> None:
    mix = clips.FootageMix.parse(["busy=0.5"], None)
    clips.write_shard(tmp_path, 0, 4, shard_frames=32, mix=mix)
    specs = [json.loads((each / "0000.json").read_text()) for each in (folder, tmp_path)]
    assert [spec[:3] for spec in specs[1]] == specs[0], "scenes do not depend on how they are filmed"
    is_busy = [spec[3:] == ["busy"] for spec in specs[1]]
    assert any(is_busy)
    assert not all(is_busy)
    for still, filmed, busy in zip(drawn, read_shard(tmp_path / "0000.json"), is_busy, strict=False):
        assert np.array_equal(still.frames, filmed.frames) != busy
        assert (still.scene == filmed.scene) != busy
        assert is_resolved(filmed.scene, 4)


@pytest.mark.parametrize("texts", [["shaky=0.1"], ["busy"], ["busy=2"], ["busy=0.6", "wild=0.5"]])
def test_shares_of_footage_that_make_no_sense_are_refused(texts: list[str]) -> None:
    with pytest.raises(RequestError, match=r"received .*; allowed: "):
        clips.FootageMix.parse(texts, None)


def test_the_batched_tower_equals_the_models_own(drawn: list[Clip]) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    visual = Qwen2_5_VLForConditionalGeneration(build_config(build_tokenizer())).model.visual
    frames = torch.from_numpy(np.array(drawn[-1].frames)).view(-1, 2, 84, 140, 3)
    patches = vision.patchify(frames)
    with torch.inference_mode():
        batched = vision.encode(visual, patches).flatten(0, 1)
        own = visual(patches.flatten(0, 1), grid_thw=torch.tensor([[len(frames), 6, 10]])).pooler_output
    assert torch.allclose(batched, own, atol=1e-5)


def test_the_recipe_makes_the_tokenizer_of_the_embedded_model() -> None:
    shipped = Qwen2Tokenizer.from_pretrained(embedded_model_path())
    assert build_tokenizer().get_vocab() == shipped.get_vocab()


def test_folding_a_transform_into_the_projector_changes_the_tower_by_just_that() -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    visual = Qwen2_5_VLForConditionalGeneration(build_config(build_tokenizer())).model.visual
    patches = torch.randn(2, 60, 1176)
    matrix, offset = torch.randn(256, 256), torch.randn(256)
    with torch.inference_mode():
        before = vision.encode(visual, patches)
        vision.fold_into_projector(visual, matrix, offset)
        after = vision.encode(visual, patches)
    assert torch.allclose(after, before @ matrix.T + offset, atol=1e-3)


def _logits_alone(model: torch.nn.Module, clip: EncodedClip, question: Question) -> torch.Tensor:
    """Logits of the answer's tokens with one question in the sequence and transformers' own positions."""
    prompts = Prompts(build_tokenizer())
    read, answer = prompts.question(question)
    ids = [*prompts.head, *[model.config.video_token_id] * (15 * len(clip)), *read, *answer]
    kinds = [2 if token == model.config.video_token_id else 0 for token in ids]
    positions, _ = model.model.get_rope_index(
        torch.tensor([ids]),
        torch.tensor([kinds]),
        video_grid_thw=torch.tensor([[len(clip), 6, 10]]),
        second_per_grid_ts=[2 * clip.gap_s],
    )
    prompt_length = len(ids) - len(answer)
    positions[:, :, prompt_length:] = torch.arange(prompt_length, len(ids)) + _delta_of_prompt(
        positions, answer
    )
    embeds = model.get_input_embeddings()(torch.tensor([ids]))
    embeds[0, [kind == 2 for kind in kinds]] = clip.embeddings.flatten(0, 1).float()
    hidden = model.model.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False)
    return model.lm_head(hidden.last_hidden_state[0, prompt_length - 1 : -1])


def _delta_of_prompt(positions: torch.Tensor, answer: list[int]) -> int:
    """What `generate` adds to the index of a new token: largest position of the prompt + 1 - its length."""
    prompt = positions[:, :, : positions.shape[2] - len(answer)]
    return int(prompt.max()) + 1 - prompt.shape[2]


def test_a_question_among_others_gets_the_logits_it_gets_alone(
    drawn: list[Clip], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(build_config(build_tokenizer())).eval()
    encoded = [
        clip for clip in encode_shard(model.model.visual, drawn[-3:], random.Random(0)) if not clip.is_image
    ]
    questions = [ask(clip, random.Random(1), 1) for clip in encoded]
    batch = make_batch(Prompts(build_tokenizer()), encoded, questions, random.Random(2), 0.0)
    with torch.inference_mode(), monkeypatch.context() as patched:
        patched.setattr(torch, "autocast", lambda *_: torch.no_grad())
        together, _, _ = language.answer_logits(model, batch)
        rows, columns = (batch.targets != NO_TARGET).nonzero(as_tuple=True)
        for row, clip in enumerate(encoded):
            mine = (rows == row) & (batch.segments[rows, columns] == 2)
            alone = _logits_alone(model, clip, questions[row][1])
            assert torch.allclose(together[mine], alone, atol=1e-4)


def test_a_cropped_clip_holds_only_what_its_frames_show(drawn: list[Clip]) -> None:
    clip = next(clip for clip in drawn if len(clip.frames) == 8)
    encoded = EncodedClip(clip.scene, clip.gap_s, torch.zeros(4, 15, 8, dtype=torch.bfloat16))
    for first, stop in ((0, 2), (1, 3), (2, 4)):
        part = crop(encoded, first, stop)
        times_s = [index * clip.gap_s for index in range(2 * first, 2 * stop)]
        shown = {item.shape for time_s in times_s for item in clip.scene.visible(time_s)}
        assert ({item.shape for item in part.scene.objects} if part else set()) == shown
        assert part is None or part.scene.duration_s == pytest.approx(clip.gap_s * 4)


def _run(module: object, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["training", *map(str, arguments)])
    module.main()  # type: ignore[attr-defined]


def _count_updates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses of all updates made from now on, in a list that grows."""
    losses: list[float] = []
    update = Training.update

    def counted(training: Training, loss: torch.Tensor, rate: float) -> None:
        losses.append(loss.item())
        update(training, loss, rate)

    monkeypatch.setattr(Training, "update", counted)
    return losses


def test_both_steps_run_resume_and_leave_a_checkpoint_that_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.colocated import ColocatedPipeline

    monkeypatch.setattr(vision, "_WHITENING_PAIRS", 64)
    tower, state = tmp_path / "tower.pt", tmp_path / "state.pt"
    seen = ("--clips", folder, "--threads", "1")
    updates = _count_updates(monkeypatch)
    _run(vision, monkeypatch, *seen, "--out", state, "--final", tower, "--steps", "2", "--batch", "4")
    _run(vision, monkeypatch, *seen, "--out", state, "--final", tower, "--steps", "3", "--batch", "4")
    assert len(updates) == torch.load(state)["step"] == 3
    taught = (*seen, "--vision", tower, "--out", tmp_path / "language.pt", "--cache", tmp_path / "encoded")
    _run(language, monkeypatch, *taught, "--budget", "300", "--steps", "1")
    _run(
        language, monkeypatch, *taught, "--budget", "300", "--steps", "2", "--checkpoint", tmp_path / "model"
    )
    assert len(updates) == 3 + 2
    answer = ColocatedPipeline.load(tmp_path / "model").ask([], "Is there a circle?", max_tokens=2)
    assert answer.usage.completion_tokens in (1, 2)


_LEARNS_IN_TWO = """
import sys
from pathlib import Path
import torch
from training.loop import Progress, Training, joined_processes, rank
layer = torch.nn.Linear(1, 1, bias=False)
with torch.no_grad():
    layer.weight.fill_(0)
training = Training({"layer": layer}, [torch.optim.SGD(layer.parameters())], Path(sys.argv[1]))
with joined_processes():
    training.update(layer(torch.tensor([[0.2, 0.6][rank()]])).sum(), 1.0)
    Progress(10, 0, until="23:59").share(1)
    training.save_now_and_then(is_over=True)
"""


def test_processes_learn_from_each_others_batches(tmp_path: Path) -> None:
    script, out = tmp_path / "learns.py", tmp_path / "state.pt"
    script.write_text(_LEARNS_IN_TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--local-addr", "127.0.0.1", str(script), str(out)]  # no machine needs to know its own name
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.load(out)["layer"]["weight"].item() == pytest.approx(-0.4)


def test_a_training_is_over_after_its_steps_or_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [Progress(200, 0).share(step) for step in (0, 50, 200)] == [0.0, 0.25, 1.0]
    now = datetime.datetime(2026, 3, 1, 18, 0)
    monkeypatch.setattr(time, "time", lambda: now.timestamp())
    progress = Progress(200, 900, "20:00", 0.4)
    assert progress.share(900) == pytest.approx(0.4)
    now += datetime.timedelta(hours=1)
    assert progress.share(5000) == pytest.approx(0.7)
    assert not progress.is_over(5000)
    now += datetime.timedelta(hours=2)
    assert progress.is_over(5000)


def test_an_end_that_is_past_today_is_that_of_tomorrow() -> None:
    now = datetime.datetime(2026, 3, 1, 23, 30)
    assert until_s("00:15", now.timestamp()) - now.timestamp() == 45 * 60


def test_the_rate_warms_up_anew_where_a_training_goes_on() -> None:
    progress = Progress(200, 900)
    assert [progress.warmed(step) for step in (900, 949, 999, 2000)] == [0.01, 0.5, 1.0, 1.0]


@dataclass(frozen=True)
class _Asked:
    targets: torch.Tensor
    segments: torch.Tensor
    questions: list[list[Question]]


def test_an_answer_is_right_if_all_its_tokens_are() -> None:
    targets = torch.tensor([[NO_TARGET, 3, 4, 5], [6, NO_TARGET, NO_TARGET, NO_TARGET]])
    segments = torch.tensor([[0, 1, 1, 2], [1, 1, 1, 1]])
    colour, count = Question(QuestionKind.COLOUR, "", ""), Question(QuestionKind.COUNT, "", "")
    tally = Tally()
    tally.add(_Asked(targets, segments, [[colour, count], [count]]), torch.tensor([1, 0, 1, 0]) > 0, "8f")
    expected = {"8f": 1 / 3, "all": 1 / 3, "colour": 0.0, "count": 0.5, "colour 8f": 0.0, "count 8f": 0.5}
    assert tally.shares() == pytest.approx(expected)


def test_the_loss_of_answers_is_a_mean_by_weight() -> None:
    logits, targets = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    single = [answers_loss(logits[[i]], targets[[i]], torch.ones(1)) for i in range(2)]
    loss = answers_loss(logits, targets, torch.tensor([3.0, 1.0]))
    assert loss.item() == pytest.approx((3 * single[0] + single[1]).item() / 4)
