"""Decoding sampled frames: CPU seconds and wall time of ours and the others, on the same files in one run.

    python -m benchmarks.video.video_decode [--quick] [--sections matrix,hour] [--fresh]

matrix: gaps x resolutions x codecs x lengths; repeats are interleaved, figures are medians, ratios are
medians of the ratios within a repeat. hour: one hour of 1080p H.264 at 1 fps, first group, and memory against
two minutes. Results are added to benchmarks/results/video_decode.json cell by cell, so that a run can be
stopped and continued.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from benchmarks.video.video_decode_contenders import Contender, contenders, missing_libraries
from epd import video
from epd.machine import usable_cpus

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "benchmarks" / "results"
FPS = 25
CLIP_S = 20
SIZES = {"360p": (640, 360), "720p": (1280, 720), "1080p": (1920, 1080)}
CODECS = {
    "h264": ("libx264", {"preset": "medium"}),
    "hevc": ("libx265", {"preset": "medium", "x265-params": "log-level=none"}),
}
GAPS_S = (0.04, 0.5, 1.0, 4.0, 10.0, 30.0)
# Seconds of video that a cell samples: enough for the gap, little enough for some thousand runs to end.
SPAN_S = {0.04: 12.0, 0.5: 16.0, 1.0: 24.0, 4.0: 32.0, 10.0: 40.0, 30.0: 60.0}
REPEATS = 3
MAX_CELL_S = 8.0


def clip(codec: str, size: str, minutes: int, cache: Path) -> Path:
    """A video of so many minutes: one encoded scene, repeated packet by packet."""
    path = cache / f"{codec}-{size}-{minutes}min.mp4"
    if not path.exists():
        scene = cache / f"{codec}-{size}-scene.mp4"
        if not scene.exists():
            _write(scene, lambda partial: _encode_scene(codec, size, partial))
        _write(path, lambda partial: _repeat(scene, partial, minutes * 60 // CLIP_S))
    return path


def _write(path: Path, make: Callable[[Path], None]) -> None:
    partial = path.with_suffix(".partial.mp4")
    make(partial)
    partial.rename(path)


def _encode_scene(codec: str, size: str, path: Path) -> None:
    """A camera that moves over a textured ground, something noisy that moves over it, and one cut."""
    width, height = SIZES[size]
    encoder, options = CODECS[codec]
    rng = np.random.default_rng(0)
    grounds = [_texture(rng, width + 512, height + 512) for _ in range(2)]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(CLIP_S * FPS):
            left, top = int(200 + 150 * np.sin(index / 37)), int(200 + 150 * np.cos(index / 53))
            image = grounds[index > 330][top : top + height, left : left + width].copy()
            y, x = index * 3 % (height - 64), index * 5 % (width - 64)
            image[y : y + 64, x : x + 64] = rng.integers(0, 256, (64, 64, 3))
            frame = av.VideoFrame.from_ndarray(image, "rgb24")
            frame.pts, frame.time_base = index, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _texture(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    coarse = torch.from_numpy(rng.integers(0, 256, (1, 3, height // 8, width // 8)).astype(np.float32))
    fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 255)
    return fine[0].permute(1, 2, 0).byte().numpy()


def _repeat(scene: Path, path: Path, times: int) -> None:
    with av.open(str(path), "w") as out:
        stream = None
        for turn in range(times):
            with av.open(str(scene)) as container:
                source = container.streams.video[0]
                stream = stream or out.add_stream_from_template(source)
                shift = int(turn * CLIP_S / source.time_base)
                for packet in container.demux(source):
                    if packet.size:
                        packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                        packet.stream = stream
                        out.mux(packet)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(contender: Contender, path: Path, times_s: list[float]) -> dict[str, float]:
    """CPU and wall seconds of one run, and how many frames came."""
    cpu, wall = cpu_s(), time.perf_counter()
    num_frames = sum(len(batch) for batch in contender.decode(path, times_s))
    if num_frames != len(times_s):
        raise RuntimeError(f"{contender.name} gave {num_frames} frames instead of {len(times_s)}")
    return {"cpu_s": cpu_s() - cpu, "wall_s": time.perf_counter() - wall}


def floor_s(path: Path, times_s: list[float]) -> float:
    """CPU seconds to decode, in one thread, just the packets that exactness needs; nothing is converted."""
    info = video.probe(path)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        stream.thread_type = "NONE"
        end = info.pts_at(times_s[-1] + 15)
        packets = [p for p in _until(container.demux(stream), end) if p.size]
        ordered = sorted(packet.pts for packet in packets)
        wanted = {ordered[max(0, bisect_right(ordered, info.pts_at(t)) - 1)] for t in times_s}
        keys = [i for i, packet in enumerate(packets) if packet.is_keyframe]
        began = cpu_s()
        for first, stop in pairwise([*keys, len(packets)]):
            group = packets[first:stop]
            count = max((i + 1 for i, packet in enumerate(group) if packet.pts in wanted), default=0)
            context.flush_buffers()
            for packet in group[:count]:
                context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
                context.decode(packet)
            if count:
                context.decode(None)
        return cpu_s() - began


def _until(packets: Iterator[av.Packet], end: int) -> Iterator[av.Packet]:
    for packet in packets:
        if packet.dts is not None and packet.dts > end:
            return
        yield packet


def check_same(path: Path, times_s: list[float], who: list[Contender]) -> None:
    """Ours and the sequential loop give the same pixels on this file."""
    some = times_s[:5]
    by_name = {one.name: one for one in who}
    first, second = (
        np.concatenate(list(by_name[name].decode(path, some))) for name in ("ours-1", "sequential")
    )
    if not np.array_equal(first, second):
        raise RuntimeError(f"ours and the sequential loop differ on {path.name}")


def run_cell(path: Path, gap_s: float, repeats: int, who: list[Contender]) -> dict[str, Any]:
    """All contenders in turn, again and again."""
    span_s = min(SPAN_S[gap_s], video.probe(path).duration_s)
    offset_s = min(gap_s / 2, 1.0)
    times_s = [float(t) for t in np.arange(offset_s, span_s, gap_s)]
    check_same(path, times_s, who)
    rounds: list[dict[str, dict[str, float]]] = []
    began = time.perf_counter()
    while len(rounds) < repeats and (not rounds or time.perf_counter() - began < MAX_CELL_S):
        rounds.append({one.name: measure(one, path, times_s) for one in who})
    return {
        "frames": len(times_s),
        "rounds": rounds,
        "floor_cpu_s": floor_s(path, times_s),
        **summary(rounds, who),
    }


def summary(rounds: list[dict[str, dict[str, float]]], who: list[Contender]) -> dict[str, Any]:
    """Medians, and per number of cores the median ratio of ours to the best of the others."""
    median = {
        one.name: {key: statistics.median(r[one.name][key] for r in rounds) for key in ("cpu_s", "wall_s")}
        for one in who
    }
    ratios: dict[str, dict[str, Any]] = {}
    for mine in (one for one in who if one.is_ours):
        rivals = [one.name for one in who if not one.is_ours and one.cores == mine.cores]
        if rivals:
            best = min(rivals, key=lambda name: median[name]["cpu_s"])
            ratio = {
                key: statistics.median(
                    r[mine.name][key] / min(r[name][key] for name in rivals) for r in rounds
                )
                for key in ("cpu_s", "wall_s")
            }
            ratios[mine.name] = {"best_other": best, "cpu": ratio["cpu_s"], "wall": ratio["wall_s"]}
    return {"median": median, "ratios": ratios}


HOUR_SCRIPT = """
import json, resource, sys, time
from epd import video
path, minutes, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
video.decode(path, [0.0], size=(28, 28))
cpu_s = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
began, cpu_began = time.perf_counter(), cpu_s()
info = video.probe(path)
times_s = video.sample_times(info, fps=1, end_s=minutes * 60)
first_s, num_frames = None, 0
with video.stream(path, times_s, size=(252, 448), workers=workers) as groups:
    for group in groups:
        first_s = first_s or time.perf_counter() - began
        num_frames += len(group.frames)
wall_s = time.perf_counter() - began
peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"first_group_s": first_s, "wall_s": wall_s, "cpu_s": cpu_s() - cpu_began,
                  "frames": num_frames, "peak_rss_mib": peak_rss_mib}))
"""


def run_hour(cache: Path, minutes: int) -> dict[str, Any]:
    """First group, whole time and peak memory, each video in a process of its own."""
    workers = usable_cpus()
    results = {}
    for name, length in (("long", minutes), ("two_minutes", 2)):
        path = clip("h264", "1080p", length, cache)
        command = [sys.executable, "-c", HOUR_SCRIPT, str(path), str(length), str(workers)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        results[name] = json.loads(done.stdout)
    long, short = results["long"], results["two_minutes"]
    return {
        **results,
        "minutes": minutes,
        "workers": workers,
        "first_group_share": long["first_group_s"] / long["wall_s"],
        "memory_ratio": long["peak_rss_mib"] / short["peak_rss_mib"],
    }


def environment() -> dict[str, Any]:
    """Versions and hardware."""
    names = (
        "av",
        "torch",
        "torchvision",
        "numpy",
        "torchcodec",
        "eva-decord",
        "decord",
        "opencv-python-headless",
    )
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "model name: unknown",
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "cpu": cpu.partition(":")[2].strip(),
        "cores": usable_cpus(),
        "not_installed": missing_libraries(),
        "span_s": {str(gap): span for gap, span in SPAN_S.items()},
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    here = results["environment"]
    lines = [
        "# Decoding sampled frames: ours against the others",
        "",
        f"{here['date']}, {here['cpu']}, {here['cores']} cores, Python {here['python']}; "
        + ", ".join(f"{name} {number}" for name, number in here["versions"].items()),
        "",
        "CPU seconds: medians of interleaved repeats. A ratio is ours divided by the best of the others at "
        "the same number of cores: below 1, ours takes less. Floor: decoding alone, of just the packets that "
        "exactness needs. Everyone gives RGB of 252 x 448, resized as torchvision does.",
        "",
        "| video | gap s | frames | repeats | floor CPU s | ours-1 CPU s | best other, 1 core | CPU s "
        "| CPU ratio | CPU ratio, 2 cores | wall ratio, 2 cores |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, cell) for name, cell in results.get("matrix", {}).items()]
    return "\n".join([*lines, *_hour_lines(results.get("hour")), *_missing_lines(here)]) + "\n"


def _row(name: str, cell: dict[str, Any]) -> str:
    one, two = cell["ratios"]["ours-1"], cell["ratios"].get("ours-2", {})
    median = cell["median"]
    clip_name, _, gap = name.rpartition(" ")
    fields = [
        clip_name,
        gap,
        str(cell["frames"]),
        str(len(cell["rounds"])),
        f"{cell['floor_cpu_s']:.3f}",
        f"{median['ours-1']['cpu_s']:.3f}",
        one["best_other"],
        f"{median[one['best_other']]['cpu_s']:.3f}",
        f"**{one['cpu']:.2f}**",
        f"{two.get('cpu', float('nan')):.2f}",
        f"{two.get('wall', float('nan')):.2f}",
    ]
    return f"| {' | '.join(fields)} |"


def _hour_lines(hour: dict[str, Any] | None) -> list[str]:
    if hour is None:
        return []
    long = hour["long"]
    return [
        "",
        f"{hour['minutes']} minutes of 1080p H.264 at 1 fps, 252 x 448, "
        f"{hour['workers']} workers: first group after {long['first_group_s']:.2f} s, "
        f"{100 * hour['first_group_share']:.2f} % of {long['wall_s']:.1f} s; "
        f"peak memory {long['peak_rss_mib']:.0f} MiB, "
        f"{hour['memory_ratio']:.3f} times that of two minutes.",
    ]


def _missing_lines(here: dict[str, Any]) -> list[str]:
    return [f"\n{name} was not installed: {how}." for name, how in here["not_installed"].items()]


def save(results: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "video_decode.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "video_decode.md").write_text(table(results))


def cells(quick: bool) -> Iterator[tuple[str, str, int, float]]:
    sizes = ["360p"] if quick else list(SIZES)
    gaps = (0.04, 1.0, 10.0) if quick else GAPS_S
    for size in sizes:
        for codec in CODECS:
            for minutes in (1,) if quick else (1, 20):
                for gap_s in gaps:
                    yield codec, size, minutes, gap_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sections", default="matrix,hour", help="comma-separated: matrix, hour, clips (only make them)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="360p, one minute, three gaps; ten minutes for the hour"
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "epd-bench-video")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, how in missing_libraries().items():
        print(f"without {name}, which is not installed: {how}", file=sys.stderr)
    previous = options.results / "video_decode.json"
    results = json.loads(previous.read_text()) if previous.exists() and not options.fresh else {}
    results["environment"] = environment()
    run_sections(options, results)
    print(table(results))


def run_sections(options: argparse.Namespace, results: dict[str, Any]) -> None:
    who = contenders()
    sections = options.sections.split(",")
    for codec, size, minutes, gap_s in cells(options.quick) if {"matrix", "clips"} & set(sections) else ():
        path = clip(codec, size, minutes, options.cache)
        name = f"{codec} {size} {minutes} min {gap_s:g}"
        if "matrix" in sections and name not in results.setdefault("matrix", {}):
            results["matrix"][name] = run_cell(path, gap_s, REPEATS, who)
            save(results, options.results)
            ratio = results["matrix"][name]["ratios"].get("ours-1", {})
            print(f"{name}: CPU ratio {ratio.get('cpu', float('nan')):.2f}", file=sys.stderr, flush=True)
    if "clips" in sections:
        for minutes in (2, 60):
            clip("h264", "1080p", minutes, options.cache)
    if "hour" in sections:
        results["hour"] = run_hour(options.cache, 10 if options.quick else 60)
        save(results, options.results)


if __name__ == "__main__":
    main()
