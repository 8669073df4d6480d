"""The verb `epd profile`: part of the composition root, see epd/cli/program.py."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epd import console
from epd.errors import RequestError
from epd.machine import memory_limit_bytes

if TYPE_CHECKING:
    from epd.profiles import HostCosts, MediaRule, MemoryNeeds, Profile, StageTable
    from epd.profiles.measuring import Action

    Points = Iterator[tuple[float, float, Action]]

_Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Folder in Hugging Face layout, by default the embedded shapes-vl; MODEL@DEVICE computes one.",
    ),
]
_Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the profile here as JSON.")]
_Repeats = Annotated[int, typer.Option(metavar="N", help="Runs of every point.")]
_Device = Annotated[str, typer.Option(metavar="NAME", help="What to call this machine in the profile.")]
_Threads = Annotated[
    int, typer.Option("--num-threads", metavar="N", min=1, help="Threads of torch, as in a worker.")
]
_WithApp = Annotated[
    bool,
    typer.Option("--app", help="Start epd serve too, and measure what it costs beside the model (minutes)."),
]
_IsJson = Annotated[bool, typer.Option("--json", help="Print the profile instead of a table.")]

_IMAGE_SIDES, _IMAGE_BATCHES = (56, 112, 224, 448), (1, 4)
_PROMPT_TOKENS, _CHUNKS = 1024, (32, 128, 512)
_DECODE_BATCHES, _DECODE_CONTEXTS = (1, 4, 16), (64, 512)
_TRANSFER_BYTES = (2**14, 2**18, 2**22, 2**25)
_VIDEO_SIZES, _VIDEO_FRAMES, _VIDEO_S = ((160, 96), (320, 192), (640, 384)), (2, 8), 2.0
# Beside 2048 pixels of height: sizes are cut to whole patches, and some shape comes close to the limit.
_WIDTHS = tuple(range(1024, 4097, 64))
_SPEED_S = 0.3
_PHOTO_SIDES = (256, 512, 1024)


def profile(
    model: _Model = None,
    out: _Out = None,
    repeats: _Repeats = 5,
    device: _Device = "this-machine",
    num_threads: _Threads = 1,
    app: _WithApp = False,
    as_json: _IsJson = False,
) -> None:
    """Measure what each stage costs on this machine.

    Encode by patches and batch, prefill by new and past tokens, decode by batch and context, transfers by
    bytes, reading media by pixels.
    """
    from epd.profiles import dump_profile

    if repeats < 1:
        raise RequestError(f"repeats are {repeats}, there must be at least 1")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise RequestError(f"cannot write {str(out)!r}; give a file name in a folder that exists")
    found = _profile_of(model, repeats, device, num_threads, with_app=app)
    if as_json:
        console.stream_text(dump_profile(found))
    else:
        _print(found)
    if out is not None:
        out.write_text(dump_profile(found), encoding="utf-8")


def _profile_of(model: str | None, repeats: int, device: str, num_threads: int, *, with_app: bool) -> Profile:
    from epd.models import embedded_model_path
    from epd.profiles import load_profile

    if model is not None and "@" in model and not Path(model).exists():
        return load_profile(model)
    path = Path(model) if model is not None else embedded_model_path()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with console.status("loading the model"):
        bench = _Bench(path, num_threads)
    with console.progress_bar("stages") as show:
        found = bench.profile(path.name, device, repeats, show)
    if not with_app:
        return found
    from epd.cli.profile_app import with_app as measured_app

    with console.progress_bar("the application") as show:
        return measured_app(found, path, show)


class _Bench:
    """A model that is loaded to be measured. Every stage alone, nothing beside it."""

    def __init__(self, path: Path, num_threads: int) -> None:
        from encoders import load_adapter
        from stages.engine.generation import GenerationSettings
        from stages.engine.setup import build_engine
        from stages.loader import load_model, use_threads

        self.adapter: Any = load_adapter(path)
        use_threads(num_threads)
        self.clock = time.process_time if num_threads == 1 else time.perf_counter
        import torch

        self.model: Any = load_model(path, torch.float32)
        settings = GenerationSettings.of(self.model.generation_config, self.adapter.tokenizer.eos_token_id)
        self.engine: Any = build_engine(self.model, self.adapter, settings)
        self._num_requests = 0

    def profile(self, name: str, device: str, repeats: int, show: console.ShowProgress) -> Profile:
        import torch

        from epd.profiles import Profile
        from epd.profiles.measuring import table
        from epd.profiles.speed import core_speed

        with tempfile.TemporaryDirectory(prefix="epd-profile-") as folder, torch.inference_mode():
            stages = (
                ("encode", "patches", "groups", self._encode_points()),
                ("transfer", "bytes", "transfers", _transfer_points()),
                ("video", "source pixels", "frames", _video_points(Path(folder))),
                ("images", "pixels", "images", _photo_points(Path(folder))),
            )
            tables: dict[str, StageTable] = {}
            speeds = [core_speed(_SPEED_S)]
            for done, (stage, units, items, points) in enumerate(stages, start=1):
                tables[stage] = table(units, items, points, repeats, self.clock)
                speeds.append(core_speed(_SPEED_S))
                show(done, len(stages) + 2)
            prefill = self._prefill_table(repeats)
            speeds.append(core_speed(_SPEED_S))
            show(len(stages) + 1, len(stages) + 2)
            decode = self._decode_table(repeats)
            speeds.append(core_speed(_SPEED_S))
            show(len(stages) + 2, len(stages) + 2)
        return Profile(
            name=f"{name}@{device}",
            model=name,
            device=device,
            is_analytic=False,
            media=_media_rule(self.adapter),
            memory=self._memory(),
            encode=tables["encode"],
            prefill=prefill,
            decode=decode,
            transfer=tables["transfer"],
            video={"h264": tables["video"]},
            images=tables["images"],
            assumptions=(
                f"measured: {repeats} runs a point, every stage alone, float32, {_num_threads()} threads, "
                f"{'CPU' if _num_threads() == 1 else 'wall'} time",
                "a transfer is a copy in memory; messages between processes are not in it",
            ),
            dtype="float32",
            num_threads=_num_threads(),
            core_speed=sum(speeds) / len(speeds),
        )

    def _encode_points(self) -> Points:
        """Images of several sizes, alone and together; making patches is part of it."""
        import torch

        tower = self.adapter.vision_tower(self.model)
        for side in _IMAGE_SIDES:
            plan = self.adapter.plan_image(side, side)
            frames = torch.zeros((1, *plan.size, 3), dtype=torch.uint8)
            for batch in _IMAGE_BATCHES:
                yield plan.grid.num_patches * batch, batch, self._encoding(tower, plan, frames, batch)

    def _encoding(self, tower: Any, plan: Any, frames: Any, batch: int) -> Action:
        from encoders.adapter import PatchRun

        def encode() -> None:
            patches = [self.adapter.preprocess(frames, plan) for _ in range(batch)]
            runs = [PatchRun(plan.kind, values, plan.grid) for values in patches]
            self.adapter.encode_batch(tower, runs)

        return encode

    def _request(self, num_tokens: int, max_tokens: int) -> Any:
        """A prompt of text that means nothing, whose answer has no early end."""
        import numpy as np

        from encoders import PromptPlan
        from epd.kv.kv_identity import token_identity
        from epd.sampling_params import SamplingParams
        from stages.engine.generation import GenerateRequest

        self._num_requests += 1
        token_ids = np.arange(num_tokens, dtype=np.int64) % 97 + 3
        num_rows = len(self.adapter.plan_prompt((), "?").positions)
        positions = np.tile(np.arange(num_tokens, dtype=np.int64), (num_rows, 1))
        prompt = PromptPlan(token_ids, positions, num_tokens, ())
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        name = f"profile-{self._num_requests}"
        return GenerateRequest(name, prompt, token_identity(token_ids.tolist()), sampling)

    def _limit(self, num_tokens: int) -> None:
        from epd.kv.scheduling import SchedulerConfig

        self.engine.scheduler.config = SchedulerConfig(num_tokens, 64, num_tokens)

    def _prefill_table(self, repeats: int) -> StageTable:
        """One long prompt, cut into chunks: each is a point of new tokens on past ones."""
        from epd.profiles import fit_table
        from epd.profiles.measuring import measurement, timed

        seconds: dict[tuple[int, int], list[float]] = {}
        for run in range(repeats + 1):
            for chunk in _CHUNKS:
                self._limit(chunk)
                self.engine.add(self._request(_PROMPT_TOKENS, 1))
                for past in range(0, _PROMPT_TOKENS, chunk):
                    elapsed_s = timed(self.engine.step, self.clock)
                    if run:  # the first does not count
                        seconds.setdefault((chunk, past), []).append(elapsed_s)
        points = [
            measurement(chunk, chunk * past + chunk * (chunk + 1) // 2, each)
            for (chunk, past), each in seconds.items()
        ]
        return fit_table("new tokens", "token pairs", points)

    def _decode_table(self, repeats: int) -> StageTable:
        from epd.profiles import fit_table
        from epd.profiles.measuring import measurement, timed

        points = []
        self._limit(4096)
        for batch in _DECODE_BATCHES:
            for context in _DECODE_CONTEXTS:
                requests = [self._request(context, repeats + 8) for _ in range(batch)]
                for request in requests:
                    self.engine.add(request)
                while any(not each.is_decoding for each in self.engine.scheduler.running) or (
                    self.engine.scheduler.waiting
                ):
                    self.engine.step()
                self.engine.step()
                seconds = [timed(self.engine.step, self.clock) for _ in range(repeats)]
                points.append(measurement(batch, batch * (context + 2 + repeats / 2), seconds))
                for request in requests:
                    self.engine.abort(request.request_id)
        return fit_table("sequences", "context tokens", points)

    def _memory(self) -> MemoryNeeds:
        from epd.profiles import MemoryNeeds
        from stages.engine.model_runner import kv_layout
        from stages.engine.setup import default_kv_tokens

        tower = self.adapter.vision_tower(self.model)
        vision = sum(each.numel() * each.element_size() for each in tower.parameters())
        total = sum(each.numel() * each.element_size() for each in self.model.parameters())
        config = self.model.config
        layers = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        kv_bytes = kv_layout(self.model).bytes_per_token
        return MemoryNeeds(
            device_bytes=memory_limit_bytes(),
            vision_weight_bytes=vision,
            language_weight_bytes=total - vision,
            kv_bytes_per_token=kv_bytes,
            embedding_bytes_per_token=4 * layers * config.get_text_config().hidden_size,
            max_kv_tokens=default_kv_tokens(kv_bytes),
        )


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _media_rule(adapter: Any) -> MediaRule:
    """What the adapter plans for a large image and a video of ten seconds, as a rule."""
    from encoders import FrameSampling, VideoFacts
    from epd.profiles import MediaRule

    image = adapter.plan_image(2048, 2048)
    video = adapter.plan_video(VideoFacts(240, 24.0, 720, 1280), FrameSampling())
    per_unit = image.grid.h * image.grid.w
    side = image.size[0] // image.grid.h
    if image.num_units > 1 or image.is_joined_whole:
        return MediaRule(
            "tiles",
            max(1, side),
            tile_patches=per_unit,
            tile_tokens=max(1, image.num_tokens // image.num_units),
            max_tiles=max(1, image.num_units - 1),
            video_fps=video.num_frames / 10,
        )
    return MediaRule(
        "grid",
        side,
        merge=round((per_unit / image.tokens_per_unit) ** 0.5),
        max_pixels=max(_area(adapter.plan_image(2048, width).size) for width in _WIDTHS),
        max_frame_pixels=max(
            _area(adapter.plan_video(VideoFacts(240, 24.0, 2048, width), FrameSampling()).size)
            for width in _WIDTHS
        ),
        frames_per_unit=video.frames_per_unit,
        video_fps=video.num_frames / 10,
    )


def _transfer_points() -> Points:
    import numpy as np

    for num_bytes in _TRANSFER_BYTES:
        source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        yield num_bytes, 0, lambda source=source, target=target: np.copyto(target, source)  # type: ignore[misc]


def _video_points(folder: Path) -> Points:
    """Short films, of which few or more frames are wanted; one thread decodes."""
    import video
    from epd.shapes import SceneRenderer, make_scene
    from video.demo_video import encode_h264

    num_frames = round(24 * _VIDEO_S)
    for width, height in _VIDEO_SIZES:
        path = folder / f"{width}.mp4"
        renderer = SceneRenderer(make_scene(7, _VIDEO_S), height, width)
        frames = (renderer.frame(index / 24) for index in range(num_frames))
        encode_h264(path, frames, fps=Fraction(24), height=height, width=width)
        for wanted in _VIDEO_FRAMES:
            times_s = [(index + 0.5) * _VIDEO_S / wanted for index in range(wanted)]

            def read(path: Path = path, times_s: list[float] = times_s) -> None:
                video.decode(path, times_s, workers=1)

            yield num_frames * width * height, wanted, read


def _photo_points(folder: Path) -> Points:
    import numpy as np
    from PIL import Image

    import video

    for side in _PHOTO_SIDES:
        path = folder / f"{side}.jpg"
        noise = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((side, side)).save(path, quality=90)
        yield side * side, 1, lambda path=path: video.load_image(path)  # type: ignore[misc]


def _print(found: Profile) -> None:
    """A row for each stage: its cost, how well that fits, and where it holds."""
    from rich.table import Table

    table = Table("stage", "by", box=None, pad_edge=False)
    for name in ("fixed s", "s per unit", "s per item", "mean error"):
        table.add_column(name, justify="right")
    table.add_column("valid for")
    stages = {"encode": found.encode, "prefill": found.prefill, "decode": found.decode}
    stages |= {"transfer": found.transfer, **found.video}
    if found.images is not None:
        stages["images"] = found.images
    for name, stage in stages.items():
        cost, span = stage.cost, stage.valid_units
        figures = [f"{each:.3g}" for each in (cost.fixed_s + cost.floor_s, *cost.slopes)]
        error = f"{stage.error:.1%}" if stage.measurements else "-"
        table.add_row(
            name, f"{stage.units}, {stage.items}", *figures, error, f"{span.low:.2g} to {span.high:.2g}"
        )
    console.stdout_console().print(table)
    if found.host is not None:
        _print_host(found.host)
    for line in found.assumptions:
        console.stdout_console().print(line)


def _print_host(host: HostCosts) -> None:
    """What the application costs beside, milliseconds."""
    from dataclasses import fields

    from rich.table import Table

    table = Table("beside the model", box=None, pad_edge=False)
    for name in ("work ms", "delay ms", "beside ms"):
        table.add_column(name, justify="right")
    for field in fields(host):
        each = getattr(host, field.name)
        if isinstance(each, float) and field.name.endswith("_s"):
            table.add_row(field.name.removesuffix("_s"), f"{1000 * each:.2f}")
        elif not isinstance(each, float | int):
            parts = (each.work_s, each.delay_s, each.beside_s)
            table.add_row(field.name, *(f"{1000 * seconds:.2f}" for seconds in parts))
    console.stdout_console().print(table)
    console.stdout_console().print(
        f"{host.num_cores} cores, {host.idle_cores:.2f} busy when nothing is asked"
    )
