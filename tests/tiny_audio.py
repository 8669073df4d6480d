"""A tiny random Qwen2-Audio, made as those of `tests.tiny_models` are, and the sounds it is asked about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from transformers import (
    AutoProcessor,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from epd import video
from epd.types import Float32Array
from tests import tiny_models
from tests.reference import generated_as_it_is

RATE = 16_000
WINDOW_S = 2  # what the tower hears at once, 30 in published checkpoints
_MELS = 8
SOUND_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}{{ message['content'] }}
{%- else -%}{% for part in message['content'] -%}
{%- if part['type'] == 'audio' -%}Audio: <|audio_bos|><|AUDIO|><|audio_eos|>
{% else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def qwen2_audio_config(
    tokenizer: Any, text: Mapping[str, int], tower: Mapping[str, int], window_s: int
) -> Qwen2AudioConfig:
    """A Qwen2-Audio of these sizes, whose tower hears `window_s` seconds at once."""
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **text, **ids},
        audio_config={"model_type": "qwen2_audio_encoder", **tower, "max_source_positions": 50 * window_s},
        audio_token_index=tokenizer.convert_tokens_to_ids(SOUND_TOKENS[0]),
    )


def build_qwen2_audio(folder: Path, seed: int = 0) -> Path:
    """Two layers of each tower and text model; clips of at most `WINDOW_S` seconds."""
    tokenizer = tiny_models.byte_level_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [*tiny_models.SPECIAL_TOKENS, *SOUND_TOKENS]})
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    }
    tower = {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "num_mel_bins": _MELS,
    }
    config = qwen2_audio_config(tokenizer, text, tower, WINDOW_S)
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=_MELS, chunk_length=WINDOW_S),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    )
    return tiny_models._save(folder, Qwen2AudioForConditionalGeneration, config, processor, seed)


class Reference:
    """transformers' own processor and model."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        self.model = Qwen2AudioForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()

    def inputs(self, clips: Sequence[Float32Array], content: Sequence[str | None]) -> Any:
        """content: texts, and None for the place of each clip."""
        parts = [{"type": "audio"} if each is None else {"type": "text", "text": each} for each in content]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        sound = {"audio": list(clips), "sampling_rate": RATE} if clips else {}
        return self.processor(text=[text], return_tensors="pt", **sound)

    def tokens(self, clips: Sequence[Float32Array], content: Sequence[str | None]) -> tuple[int, ...]:
        return generated_as_it_is(self.model, self.inputs(clips, content))


def heard(path: Path, start_s: float = 0.0, end_s: float | None = None) -> Float32Array:
    """The samples of a file, decoded as a whole."""
    whole = video.load_audio(path, video.AudioSlice(RATE, 1 << 24))
    return whole[round(start_s * RATE) : None if end_s is None else round(end_s * RATE)]


def tones(seconds: float, rate: int, channels: int = 1, seed: int = 0) -> Float32Array:
    """Sines that change twice a second, float32 [channels, N], the last channel silent if there are two."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    pitch = rng.uniform(100, 2000, int(2 * seconds) + 1)[(2 * times).astype(int)]
    wave = (0.5 * np.sin(2 * np.pi * pitch * times)).astype(np.float32)
    return np.stack([wave] + [np.zeros_like(wave)] * (channels - 1))


def write_audio(
    path: Path, wave: Float32Array, rate: int, codec: str = "pcm_s16le", container: str | None = None
) -> Path:
    """Encodes float32 [channels, N]."""
    layout = "stereo" if len(wave) == 2 else "mono"
    with av.open(str(path), "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate)
        step = 1024
        for start in range(0, wave.shape[1], step):
            piece = np.ascontiguousarray(wave[:, start : start + step])
            frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            for each in resampler.resample(frame):
                out.mux(stream.encode(each))
        out.mux(stream.encode(None))
    return path


def with_sound(pictures: Path, sound: Path, path: Path) -> Path:
    """Writes the pictures of one file and the sound of another as they are encoded."""
    with av.open(str(pictures)) as seen, av.open(str(sound)) as track, av.open(str(path), "w") as out:
        tracks = [seen.streams.video[0], track.streams.audio[0]]
        copies = [out.add_stream_from_template(each) for each in tracks]
        for each, copy in zip(tracks, copies, strict=True):
            for packet in each.container.demux(each):
                if packet.dts is not None:
                    packet.stream = copy
                    out.mux(packet)
    return path
