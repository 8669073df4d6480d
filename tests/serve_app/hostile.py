"""Bodies that once stopped, slowed or ended a server of this kind, and how to draw more of them.

Each was seen against this server, or published against another: CVE numbers are of vLLM, #33035 of SGLang.
"""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

from tests.serve_app.conftest import JSON, image_part, video_part

Body = bytes | JSON | Callable[[], "bytes | JSON"]

MAX_INT64 = 2**63 - 1
TEXT = "What colour is it?"
# Answered to the end of the context, or until the client leaves.
ENDLESS = "max_tokens 2^62 without an end"
# Widest and highest of a PNG whose pixels take less than this; the file has a few KB.
_WIDE = 8889


def text_question(text: str = TEXT, **fields: Any) -> JSON:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}


def question_about(*parts: JSON, **fields: Any) -> JSON:
    content = [*parts, {"type": "text", "text": TEXT}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def raw(body: JSON, before: str, after: str) -> bytes:
    """JSON with something in it that Python's `json` does not write."""
    return json.dumps(body).replace(before, after).encode()


def png(width: int, height: int, *, claimed: tuple[int, int] | None = None) -> bytes:
    """A grey picture, of one bit a pixel; its header may claim another size than its pixels have."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + b"\xaa" * ((width + 7) // 8)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", *(claimed or (width, height)), 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def url_of(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def picture(data: bytes) -> JSON:
    return image_part(url_of("image/png", data))


def claiming(video: bytes, num_frames: int, ticks: int = 1) -> bytes:
    """An MP4 whose table of times claims so many frames, of so many ticks each."""
    data = bytearray(video)
    at = data.index(b"stts") + 8  # after the name, version and flags: the number of entries, then pairs
    struct.pack_into(">III", data, at, 1, num_frames, ticks)
    at = data.index(b"stsz") + 8
    struct.pack_into(">II", data, at, 100, num_frames)  # all of 100 bytes: no table follows
    return bytes(data)


def named(video: bytes, image: bytes) -> dict[str, Body]:
    """At least sixty, by name. video, image: real ones. Large bodies are made when they are asked for."""
    return {
        **_amounts(),
        **_texts(),
        **_sampling(),
        **_structures(),
        **_media(video),
        **_frames(video_part(url_of("video/mp4", video))),
        **_fields(image_part(url_of("image/png", image))),
    }


def _amounts() -> dict[str, Body]:
    return {
        "max_tokens 2^62": text_question(max_tokens=2**62),
        "max_tokens 10^9": text_question(max_tokens=10**9),
        "max_tokens 2^63": text_question(max_tokens=2**63),
        "max_tokens 10^400": raw(text_question(max_tokens=7), "7", "1" + "0" * 400),
        "max_completion_tokens 2^62": text_question(max_completion_tokens=2**62),
        "max_tokens 2^62, n 128": text_question(max_tokens=2**62, n=128),
        ENDLESS: text_question(max_tokens=2**62, ignore_eos=True),
        "max_tokens 0": text_question(max_tokens=0),
        "max_tokens -1": text_question(max_tokens=-1),
        "max_tokens as a float": text_question(max_tokens=1e300),
        "n 10^9": text_question(n=10**9),
        "n 0": text_question(n=0),
        "n 128": text_question(n=128, temperature=1.0),
        "min_tokens 2^62": text_question(min_tokens=2**62),
        "min_tokens over max_tokens": text_question(min_tokens=100, max_tokens=2),
        "logprobs of 2^31 tokens": text_question(logprobs=True, top_logprobs=2**31),
        "16 stop strings of 100,000": lambda: text_question(
            stop=["x" * 99_999 + str(i) for i in range(16)], n=4
        ),
        "a stop string of 8 MB": lambda: text_question(stop="x" * (8 << 20)),
        "100,000 stop strings": lambda: text_question(stop=["x"] * 100_000),
        "an empty stop string": text_question(stop=[""]),
        "1,000,000 stop_token_ids": lambda: text_question(stop_token_ids=[1] * 1_000_000),
        "stop_token_ids that are no tokens": text_question(stop_token_ids=[MAX_INT64, 0]),
        "bad_words of 1 MB": lambda: text_question(bad_words=["x" * 1000] * 1000),
        "logit_bias of 200,000": lambda: text_question(logit_bias={str(i): 1.0 for i in range(200_000)}),
        "truncate_prompt_tokens": text_question(truncate_prompt_tokens=2**62),
        "prompt_logprobs": text_question(prompt_logprobs=2**31),
    }


def _texts() -> dict[str, Body]:
    return {
        "a text of 4 MB": lambda: text_question("word " * (4 << 18)),
        "a text of 24 MB": lambda: text_question("word " * (24 << 18)),
        "a text of 24 MB without a space": lambda: text_question("a" * (24 << 20)),
        "a text just over the context": text_question("word " * 40_000),
        "emoji of 1 MB": lambda: text_question("\U0001f9ff" * (1 << 18)),
        "a lone surrogate": raw(text_question("@@"), "@@", "\\ud800"),
        "zero bytes": text_question("\0" * 1000),
        "control characters": text_question("".join(map(chr, range(32))) * 100),
        "the model's own marks": text_question("<|vision_start|><|video_pad|><|im_end|>" * 50),
        "a mark of a video without one": text_question("<|video_pad|>" * 2000),
        "an empty text": text_question(""),
        "right-to-left and joiners": text_question("\u202e\u200d\ufeff" * 500),
        "a system prompt of 4 MB": lambda: {
            "messages": [{"role": "system", "content": "x" * (4 << 20)}, {"role": "user", "content": "?"}]
        },
        "a model's name of 1 MB": lambda: text_question(model="m" * (1 << 20)),
        "a user of 1 MB": lambda: text_question(user="u" * (1 << 20)),
    }


def _sampling() -> dict[str, Body]:
    return {
        "temperature 5e-324": text_question(temperature=5e-324),
        "temperature 1e308": text_question(temperature=1e308),
        "temperature NaN": raw(text_question(temperature=7.5), "7.5", "NaN"),
        "temperature Infinity": raw(text_question(temperature=7.5), "7.5", "1e999"),
        "top_p 5e-324": text_question(top_p=5e-324, temperature=1.0),
        "top_k 2^62": text_question(top_k=2**62, temperature=1.0),
        "min_p 1": text_question(min_p=1.0, temperature=2.0),
        "repetition_penalty 5e-324": text_question(repetition_penalty=5e-324),
        "repetition_penalty 1e308": text_question(repetition_penalty=1e308),
        "penalties at their ends": text_question(presence_penalty=-2.0, frequency_penalty=2.0),
        "a penalty beyond its end": text_question(presence_penalty=-2.000001),
        "seed -2^63": text_question(seed=-(2**63), temperature=1.0),
        "seed 2^64": text_question(seed=2**64),
        "best_of 10^9": text_question(best_of=10**9),
        "beam search": text_question(use_beam_search=True, n=100),
    }


def _structures() -> dict[str, Body]:
    one = {"role": "user", "content": "x"}
    part = {"type": "text", "text": "x"}
    return {
        "no body": b"",
        "null": b"null",
        "a list": b"[]",
        "half of a body": json.dumps(text_question()).encode()[:-9],
        "100,000 brackets": b"[" * 100_000,
        "100,000 objects within objects": b'{"a":' * 100_000,
        "5,000,000 numbers": lambda: raw(text_question(stop=[7]), "[7]", f"[{'1,' * 5_000_000}1]"),
        "300,000 unknown fields": lambda: text_question(**{f"f{i}": 1 for i in range(300_000)}),
        "a field of a million zeros": lambda: raw(text_question(seed=7), "7", "1" + "0" * 1_000_000),
        "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        "UTF-16": json.dumps(text_question()).encode("utf-16"),
        "messages as an object": text_question() | {"messages": {"0": one}},
        "no messages": text_question() | {"messages": []},
        "100,000 messages": lambda: text_question() | {"messages": [one] * 100_000},
        "100,000 parts": lambda: (
            text_question() | {"messages": [{"role": "user", "content": [part] * 100_000}]}
        ),
        "1,024 messages of 1,024 parts": lambda: (
            text_question() | {"messages": [{"role": "user", "content": [part] * 1024}] * 1024}
        ),
        "content null": text_question() | {"messages": [{"role": "user", "content": None}]},
        "a role of nobody": text_question() | {"messages": [{"role": "root", "content": "x"}]},
        "twice the same field": raw(text_question(seed=7), "}]", '}], "max_tokens": 1'),
        "CVE-2026-105757: a schema that is none": text_question(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}}
        ),
        "CVE-2026-105757: a grammar that explodes": text_question(
            structured_outputs={"regex": "((((a+)+)+)+)+$"}
        ),
        "a schema that refers to itself": text_question(
            response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
        ),
        "guided_json": text_question(guided_json={"type": "object"}),
        "100,000 tools": lambda: text_question(tools=[{"type": "function"}] * 100_000),
        "a chat template": text_question(chat_template="{% for i in range(10**9) %}x{% endfor %}"),
    }


def _media(video: bytes) -> dict[str, Body]:

    def mp4(data: bytes, **fields: Any) -> JSON:
        return question_about(video_part(url_of("video/mp4", data)), **fields)

    def bombs(count: int) -> JSON:
        return question_about(*[picture(png(_WIDE, _WIDE))] * count)

    return {
        "a picture of 79 megapixels": lambda: bombs(1),
        "16 pictures of 79 megapixels": lambda: bombs(16),
        "a picture that claims 2^62 pixels": question_about(
            picture(png(8, 8, claimed=(2**31 - 1, 2**31 - 1)))
        ),
        "a picture of a million rows": lambda: question_about(picture(png(8, 1_000_000))),
        "a picture of no pixels": question_about(picture(png(8, 8, claimed=(0, 0)))),
        "SGLang #33035: 64 pictures of 16 megapixels": lambda: question_about(
            *[picture(png(4000, 4000))] * 64
        ),
        "65 pictures": lambda: question_about(*[picture(png(8, 8))] * 65),
        "3 million claimed frames": lambda: mp4(claiming(video, 3_000_000), epd={"num_frames": 3_000_000}),
        "50 million claimed frames": lambda: mp4(claiming(video, 50_000_000), epd={"num_frames": 50_000_000}),
        "4 billion claimed frames": lambda: mp4(claiming(video, 2**32 - 1), epd={"fps": 600.0}),
        "claimed frames that last for ever": lambda: mp4(claiming(video, 1000, ticks=2**31 - 1)),
        "half a video": lambda: mp4(video[: len(video) // 2]),
        "a video of zeros": lambda: mp4(video[:64] + bytes(len(video))),
        "a video without a picture": lambda: mp4(video.replace(b"avc1", b"xxxx")),
        "a video called an image": lambda: question_about(
            image_part(f"data:image/png;base64,{base64.b64encode(video).decode()}")
        ),
        "24 MB of %41": lambda: question_about(image_part("data:image/png," + "%41" * (8 << 20))),
        "24 MB that are no base64": lambda: question_about(
            image_part("data:image/png;base64," + "!" * (24 << 20))
        ),
        "24 MB of base64": lambda: question_about(image_part("data:image/png;base64," + "A" * (24 << 20))),
        "an SVG": question_about(
            image_part("data:image/svg+xml,<svg xmlns='x'><image href='/etc/passwd'/></svg>")
        ),
        "a playlist": question_about(
            video_part(
                "data:video/mp4;base64,"
                + base64.b64encode(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n").decode()
            )
        ),
        "a file of the server": question_about(image_part("file:///etc/passwd")),
        "an endless file": question_about(video_part("file:///dev/zero")),
        "the cloud's metadata": question_about(image_part("http://169.254.169.254/latest/meta-data/")),
        "an unknown scheme": question_about(image_part("gopher://127.0.0.1:1/")),
        "64 URLs that lead nowhere": question_about(*[image_part("http://127.0.0.1:9/x.png")] * 64),
        "a URL of 1 MB": lambda: question_about(image_part("http://127.0.0.1/" + "x" * (1 << 20))),
    }


def _frames(video: JSON) -> dict[str, Body]:
    def wanted(**ours: Any) -> JSON:
        return question_about(video, epd=ours)

    return {
        "num_frames 2^62": wanted(num_frames=2**62),
        "num_frames 10^6": wanted(num_frames=10**6),
        "fps 1e308": wanted(fps=1e308),
        "fps 5e-324": wanted(fps=5e-324),
        "start_s 1e308": wanted(start_s=1e308),
        "end_s 5e-324": wanted(end_s=5e-324),
        "end before start": wanted(start_s=2.0, end_s=1.0),
        "a span of nothing": wanted(start_s=1.0, end_s=1.0000000001, fps=1e9),
        "retention 5e-324": wanted(retention=5e-324),
        "retention of another method": wanted(retention=0.5, reduction="x" * 1000),
        "compute_share 5e-324": wanted(retention=0.5, reduction="fastkv", compute_share=5e-324),
        "retention_min over 1": wanted(retention_min=2.0),
        "deadline_s 5e-324": wanted(deadline_s=5e-324),
        "deadline_s 1e308": wanted(deadline_s=1e308, num_frames=2),
        "CVE-2026-105758: num_frames": question_about(video, mm_processor_kwargs={"num_frames": 10**18}),
        "CVE-2026-105758: fps": question_about(video, mm_processor_kwargs={"fps": 1e300}),
        "CVE-2026-105758: max_frames": question_about(
            video, media_io_kwargs={"video": {"max_frames": 10**12}}
        ),
        "CVE-2026-105758: media_io_kwargs": question_about(
            video, media_io_kwargs={"video": {"num_frames": 10**18}}
        ),
        "CVE-2026-105760: media_io_kwargs": question_about(
            video, media_io_kwargs={"video": {"num_frames": -1}}
        ),
        "min_pixels 2^62": question_about(video, mm_processor_kwargs={"min_pixels": 2**62}),
        "64 videos": question_about(*[video] * 64, epd={"num_frames": 4096}),
    }


def _fields(image: JSON) -> dict[str, Body]:
    return {
        "priority -2^63": text_question(priority=-(2**63)),
        "priority 2^63 - 1": text_question(priority=MAX_INT64),
        "cache_salt empty": text_question(cache_salt=""),
        "cache_salt of 1 MB": lambda: text_question(cache_salt="s" * (1 << 20)),
        "kv_transfer_params": text_question(kv_transfer_params={"remote_host": "127.0.0.1"}),
        "vllm_xargs": text_question(vllm_xargs={"x": [1] * 1000}),
        "lora_request": text_question(lora_request={"lora_path": "/etc"}),
        "stream_options without a stream": text_question(stream_options={"include_usage": True}),
        "detail of an image": question_about(
            {**image, "image_url": {**image["image_url"], "detail": "x" * 1000}}
        ),
        "an image in a system message": {
            "messages": [{"role": "system", "content": [image]}, {"role": "user", "content": "x"}]
        },
        "modalities": text_question(modalities=["audio"] * 1000),
        "request_id of 1 MB": lambda: text_question(request_id="r" * (1 << 20)),
        "documents": text_question(documents=[{"text": "x"}]),
        "epd of unknown options": text_question(epd={"frames": 3}),
    }


def content_of(body: Body) -> bytes:
    made = body() if callable(body) else body
    return made if isinstance(made, bytes) else json.dumps(made).encode()


_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 128, 129, 1024, 10**6, 2**31, 2**53, 2**62, MAX_INT64, 2**63, -(2**63), 10**30,
    0.0, -0.0, 0.5, 1.0, 2.0, 1.5, 1e-9, 5e-324, 1e300, 1e308, -1e308, 0.05, 0.999999,
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (
    None, True, False, "", "x", "1", "auto", "none", [], [[]], {}, ["x"], [1, 2], {"a": 1}, [None],
    "\0", "é" * 300, ["x"] * 20, [0] * 2000, {"type": "text"}, {"type": "json_object"}, "balanced",
    "mustdrop", "quickprefill",
)  # fmt: skip
_FIELDS = (
    "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "stream", "stream_options", "priority", "mm_processor_kwargs",
    "user", "cache_salt", "include_stop_str_in_output", "messages",
)  # fmt: skip
# Most of what these may hold is refused.
_REFUSED = (
    "response_format", "tools", "tool_choice", "logit_bias", "modalities", "model", "skip_special_tokens",
    "echo", "add_generation_prompt", "chat_template_kwargs", "reasoning_effort", "bad_words",
)  # fmt: skip
_OURS = (
    "fps", "num_frames", "start_s", "end_s", "retention", "reduction", "retention_min", "deadline_s",
    "events",
)  # fmt: skip


def drawn(random_: random.Random, parts: list[JSON]) -> JSON:
    """A question with one to three fields that were not meant so. parts: media that it may be about."""
    about = random_.sample(parts, random_.choice((0, 0, 1, 1, 2)))
    body = question_about(*about) if about else text_question()
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        value = random_.choice(_NUMBERS if random_.random() < 0.7 else _OTHERS)
        if random_.random() < 0.35:
            body.setdefault("epd", {})
            if isinstance(body["epd"], dict):
                body["epd"][random_.choice(_OURS)] = value
        else:
            body[random_.choice(_FIELDS if random_.random() < 0.7 else _REFUSED)] = value
    return body
