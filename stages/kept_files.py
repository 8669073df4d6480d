"""Opens the files of `cache_dir` that a stage of a model reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from epd.engine_config import EngineConfig
from epd.models.hub import name_of
from epd.store.piece_files import PieceFiles, make_folder, model_digest, namespace
from epd.store.slabs import Slabs

KV_KIND = "keys and values"
EMBEDDINGS_KIND = "embeddings"


def kept_files(model: Path, options: EngineConfig, kind: str, facts: Mapping[str, str]) -> PieceFiles:
    """Opens the files of what a model makes of media, in `options.cache_dir`.

    kind: of what is kept. facts: whatever else changes it. Raises RequestError for a folder that cannot be
    written, and as `open_store`.
    """
    assert options.cache_dir is not None
    folder = options.cache_dir.expanduser()
    make_folder(folder)
    adapters = options.adapters if kind == KV_KIND else ()  # they change no embedding
    about = {"kind": kind, "visual": options.visual_text, **facts}
    digests = {f"lora {each.name}": model_digest(each.path, folder) for each in adapters}
    name = namespace({**about, **digests, "weights": model_digest(model, folder)})
    about = {"model": name_of(model), **about}
    beneath = None if options.cache_objects is None else Slabs(options.cache_objects, name, about)
    return PieceFiles(folder, name, options.cache_bytes, about, beneath)
