"""One checkpoint on three workers of one process: an encoder, a prefill worker and a decode worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from encoders.adapter import MediaPlan
from encoders.groups import MediaGroup, plan_groups
from encoders.identity import prompt_identity
from epd.sampling_params import SamplingParams
from epd.transfer.connectors import EncoderConnector, KVConnector
from serve_app.worker.worker_stages import StageBuilder, WorkerSettings
from stages.connectors import InProcessHub
from stages.encode.encoder_pool import EncoderPool, EncoderPoolShape
from stages.encode.splicing import spliced
from stages.engine.generation import GenerateRequest
from stages.engine.kv_pool import KVPools, KVPoolsShape
from stages.placement import Placement
from tests.stages.encode.sharded_encoding import ShardedEncoding


class OneProcess:
    """The transport of workers that share a process."""

    def __init__(self) -> None:
        self._embeddings, self._kv = InProcessHub(), InProcessHub()

    def embeddings(
        self, name: str, shape: EncoderPoolShape, device: torch.device
    ) -> tuple[EncoderPool, EncoderConnector]:
        pool = shape.build(device=device)
        return pool, self._embeddings.connect(name, pool)

    def kv(self, name: str, shape: KVPoolsShape, device: torch.device) -> tuple[KVPools, KVConnector]:
        pools = shape.build(device=device)
        return pools, self._kv.connect(name, pools)

    def weights(self, path: Path, placement: Placement) -> Path | None:  # noqa: ARG002
        return None

    def close(self, name: str) -> None:  # noqa: ARG002
        raise AssertionError("these workers keep their roles")


class SplitCheckpoint:
    """The workers, each with the weights of its role alone, read from the checkpoint's files."""

    def __init__(self, path: Path) -> None:
        transport = OneProcess()
        settings = WorkerSettings(path, "cpu", "float32", num_kv_tokens=4096, num_embeddings=4096)
        encoder, language = StageBuilder(settings, transport), StageBuilder(settings, transport)
        self.adapter = encoder.adapter
        self.encode = encoder.encode("e0")
        self.receiver = language.receiver("p0")
        self.prefill = language.prefill("p0")
        self.decode = StageBuilder(settings, transport).decode("d0")

    @torch.inference_mode()
    def answer(
        self, plans: Sequence[MediaPlan], frames: Sequence[Tensor], question: str, num_tokens: int
    ) -> list[int]:
        """Greedy tokens. frames: of each item all units, uint8 [N, h, w, 3]."""
        hashes = [f"item {index}" for index in range(len(plans))]
        groups = plan_groups(plans, hashes, model="shrunk", group_tokens=8)
        prompt = self.adapter.plan_prompt(plans, question)
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        request = GenerateRequest("r", prompt, prompt_identity(prompt, hashes), sampling)
        ticket = self.decode.reserve("r", "p0", request.identity, sampling)
        assert ticket is not None
        self.prefill.submit(request, ticket)

        def frames_of(group: MediaGroup) -> Tensor:
            part = plans[group.item].frame_range(group.start, group.stop)
            return frames[group.item][part.start : part.stop]

        encoded = ShardedEncoding([self.encode], self.receiver).encode("r", groups, frames_of)
        tokens: dict[int, int] = {}
        for placed in spliced(self.adapter, prompt, encoded):
            self.prefill.add_embeddings("r", placed)
            self._step(tokens)
        while self.prefill.has_work() or self.decode.has_work():
            self._step(tokens)
        return [tokens[index] for index in sorted(tokens)]

    def _step(self, tokens: dict[int, int]) -> None:
        for stage in (self.prefill, self.decode):
            result = stage.step()
            assert not result.faults
            tokens.update({output.index: output.token.token_id for output in result.outputs})
