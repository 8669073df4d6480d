"""A folder that programs may be started in and must not import from."""

from __future__ import annotations

from pathlib import Path

PACKAGES = ("epd", "video", "encoders", "stages", "serve_app")


def write_hostile_packages(folder: Path) -> None:
    """Makes a folder with packages that have the names of ours and fail when they are imported."""
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} of the current folder')\n")
