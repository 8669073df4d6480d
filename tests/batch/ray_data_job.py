"""`python -m tests.batch.ray_data_job PROGRAM OUT`: runs a pipeline of Ray Data, Python that writes OUT."""

from __future__ import annotations

import json
import sys

import ray.data

from epd.serve_app.ray.cluster import RaySettings, ray_cluster


def main(program: str, out: str) -> None:
    ray.data.DataContext.get_current().enable_progress_bars = False
    with ray_cluster(RaySettings(num_cpus=2)):
        exec(program, {})
        print(json.dumps(ray.data.read_parquet(out).columns()))


if __name__ == "__main__":
    main(*sys.argv[1:])
