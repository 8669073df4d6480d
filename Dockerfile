# Two images: `docker build --target cpu .` and `--target cuda`. Each runs `epd`, as a user without rights, in /work.
# docs/how-to/run-in-a-container.md says how to run them. tests/deploy/test_image.py replays the steps without Docker.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir -c constraints.txt setuptools
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS cpu
# Torch's index of CPU wheels leaves out 3 GB of NVIDIA's libraries: --build-arg UV_EXTRA_INDEX_URL=...
ARG UV_EXTRA_INDEX_URL=
COPY --from=wheel /wheels /wheels
COPY constraints.txt constraints-hashes.txt /wheels/
# --build-arg REQUIRE_HASHES=1 takes the archives that were tested and no others, on x86-64 from the usual index.
ARG REQUIRE_HASHES=
# uv unpacks and compiles with all cores. As a user without rights the program could not keep what it compiles.
RUN grep "^uv==" "/wheels/constraints${REQUIRE_HASHES:+-hashes}.txt" > /wheels/uv.txt && pip install --no-cache-dir -r /wheels/uv.txt
ENV UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 UV_INDEX_STRATEGY=unsafe-best-match
RUN [ -z "${REQUIRE_HASHES:-}" ] || python -m uv pip install --python "$(command -v python)" --no-deps --require-hashes -r /wheels/constraints-hashes.txt
RUN python -m uv pip install --python "$(command -v python)" -c /wheels/constraints.txt "$(ls /wheels/*.whl)[serve]"
COPY LICENSE NOTICE /licenses/
RUN useradd --create-home --uid 1000 epd && install --directory --owner epd /work
USER epd
WORKDIR /work
ENV OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1
EXPOSE 8000
# A start on a GPU loads weights and captures graphs for minutes.
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["epd"]
CMD ["serve", "--local", "--host", "0.0.0.0"]

FROM cpu AS cuda
USER root
# Triton compiles a small launcher for each kernel when it is first used.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER epd
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
CMD ["serve", "--local", "--host", "0.0.0.0", "--device", "cuda"]
