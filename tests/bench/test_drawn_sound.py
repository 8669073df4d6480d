"""Clips of sound that are drawn for traffic."""

from __future__ import annotations

import base64

from epd import video
from epd.bench.media import MediaLibrary, media_keys
from epd.workload.config import load_workload


def test_sound_is_sent_as_long_as_it_is_planned(library: MediaLibrary) -> None:
    part = {"audios": 2, "audio_s": "0.5..3"}
    plan = load_workload(None, {"num_requests": 3, "mix": [part]}).resolve()
    requests = list(plan.requests(4))
    assert {request.shape.kind for request in requests} == {"audio"}
    library.draw(requests, lambda _done, _all: None)
    sent = library.load(requests)
    assert len({each.base64 for each in sent.values()}) == 6
    for request in requests:
        for key, clip in zip(media_keys(request), request.shape.audios, strict=True):
            assert (sent[key].mime, sent[key].kind) == ("audio/wav", "audio_url")
            samples = video.load_audio(base64.b64decode(sent[key].base64), video.AudioSlice(16_000, 1 << 20))
            assert len(samples) == round(16_000 * clip.duration_s)
            assert 0.3 < abs(samples).max() < 1
