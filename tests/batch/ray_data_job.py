"""`python -m tests.batch.ray_data_job URL KEY IN OUT`: a pipeline of Ray Data that asks about its rows."""

from __future__ import annotations

import json
import sys

import ray.data

from epd.batch import ask_videos
from epd.serve_app.ray.cluster import RaySettings, ray_cluster


def main(url: str, key: str, source: str, out: str) -> None:
    ray.data.DataContext.get_current().enable_progress_bars = False
    with ray_cluster(RaySettings(num_cpus=2)):
        asked = ask_videos(
            ray.data.read_parquet(source),
            url=url,
            api_key=key,
            compute=ray.data.ActorPoolStrategy(size=2),
        )
        asked.write_parquet(out)
        print(json.dumps(ray.data.read_parquet(out).columns()))


if __name__ == "__main__":
    main(*sys.argv[1:])
