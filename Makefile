# Two commands matter: `make demo` asks questions about a real video, `make test` checks everything.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# What is installed. pip is upgraded: the one that comes with Python 3.11 takes 50 s longer to resolve the rest.
PARTS  := -c constraints.txt pip -e '.[dev]'
# uv installs in a third of pip's time, but reads none of pip's settings: those of indexes are passed on.
UV     := UV_SYSTEM_CERTS=1 $(BIN)/uv pip install --quiet --index-strategy unsafe-best-match
PASSED := sed -nE "s/\\\\n/ /g; s/^[^=]*\.((extra-)?index-url|find-links)='(.*)'/\1 \3/p" | while read -r name values; do printf -- "--$$name %s " $$values; done
# Files with tests that measure time, marked `timed`: a core is theirs at once, since all else is nicer.
TIMED  := tests/serve_app/http/test_hostile.py
# Processes of tests that run at once: one of them has all tests of Ray, which wait much of their time.
TEST_PROCESSES ?= 3
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false
# Installed modules are compiled when they are first imported, a third of them, and then kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-together test-timed test-compiled test-topologies explore soak faults structured clients witness kernels modules check lint types fix wheel release hashes site bench score gpu gpu-dry clean
.DEFAULT_GOAL := help

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt uv
	$(UV) --python $(BIN)/python $$($(PIP) config list | $(PASSED)) $(PARTS) || \
	  { $(PIP) install --quiet --upgrade -c constraints.txt pip && $(PIP) install --quiet --no-compile $(PARTS); }
	touch $@

demo: $(STAMP) ## make a 60 s video, ask five questions, print answers, truth and timings
	$(BIN)/epd demo

# Types are checked while tests are compiled, and go on beside the tests: no core waits for the other.
test: lint ## lint, types and all tests, in TEST_PROCESSES at once (how long: CONTRIBUTING.md)
	$(MAKE) --no-print-directory -j 3 types test-together test-timed

# Imports all tests once, beside mypy: each process of tests would compile them and what they import itself.
# What fails here fails again where it is shown.
test-compiled: $(STAMP)
	-@$(BIN)/python -m pytest --collect-only -qq > /dev/null

test-together: test-compiled
	nice $(BIN)/python -m pytest -n $(TEST_PROCESSES) --no-loadscope-reorder -m "not timed"

test-timed: test-compiled
	$(BIN)/python -m pytest -m timed $(TIMED)

test-topologies: $(STAMP) ## ask the app on Ray in every topology
	EPD_TEST_TOPOLOGIES="1epd 1ep1d 1e1pd 1e1p1d 2e1p1d 2e2p2d" $(BIN)/python -m pytest tests/serve_app/ray/test_app.py

explore: $(STAMP) ## property tests with examples that were never drawn before
	$(BIN)/python -m pytest --hypothesis-profile=explore -m hypothesis

soak: $(STAMP) ## 200 streams while workers of every role are killed and stopped; other processes killed; slow and hostile clients
	EPD_SOAK=2e2p2d $(BIN)/python -m pytest tests/serve_app/ray/test_faults.py tests/serve_app/ray/test_deployments.py tests/serve_app/ray/test_lost_processes.py tests/serve_app/ray/test_lost_proxy.py tests/serve_app/http/test_slow_clients.py tests/serve_app/http/test_hostile.py tests/serve_app/http/test_grown_bodies.py tests/serve_app/http/test_openapi.py tests/serve_app/http/test_openapi_real.py tests/serve_app/http/test_prompt_routes.py tests/test_any_length.py tests/test_works_with.py tests/serve_app/local/test_bad_lines.py -o timeout=1800

SEEDS ?= 1000
SEED_PROCESSES ?= 1
faults: $(STAMP) ## SEEDS runs of an application in simulated time while processes are lost; figures in benchmarks/results/faults.md
	nice $(BIN)/python -m tests.faults --twice --seeds $(SEEDS) --processes $(SEED_PROCESSES) --results benchmarks/results/faults.md

structured: $(STAMP) ## 1,000 drawn schemas at temperature 1.5 in 1e1p1d, every document validated; the cost of a step
	$(BIN)/python -m benchmarks.serving.structured

clients: $(STAMP) ## 1,000 requests by each of 9 clients and load generators of others, in environments of their own (CLIENTS="--requests 20 --local")
	$(BIN)/python -m benchmarks.clients.page
	$(BIN)/python -m benchmarks.clients $(CLIENTS)

witness: $(STAMP) ## read the time drawn into 10,000 frames of clips of every container and rate; needs tesseract (WITNESS="--frames 500")
	$(BIN)/python -m benchmarks.witness $(WITNESS)

kernels: $(STAMP) ## compile every GPU kernel for sm_80 and sm_90, here; fails where one spills or does not fit
	$(BIN)/python -m tests.stages.kernels_ahead

modules: $(STAMP) ## print every module of the product in one line
	@$(BIN)/python -m tests.modules_page

check: lint types ## lint and types only

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	nice $(BIN)/mypy

fix: $(STAMP) ## format and apply safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: ## build dist/epd_vlm-VERSION-py3-none-any.whl, without the environment
	rm -rf build
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

release: $(STAMP) ## build the wheel twice with equal bytes, the source archive, and sbom.json: what these packages need, by CycloneDX
	rm -rf build dist
	$(BIN)/python -m tests.deploy.release dist
	$(PYTHON) -m venv build/sbom && build/sbom/bin/pip install --quiet -c constraints.txt 'cyclonedx-bom==7.5.0' "$$(ls dist/*.whl)[serve]"
	build/sbom/bin/cyclonedx-py environment --output-reproducible --output-file dist/sbom.json build/sbom

hashes: $(STAMP) ## write constraints-hashes.txt: the archives of epd-vlm[serve] in its image, for pip --require-hashes
	$(BIN)/python -m tests.deploy.hashes constraints-hashes.txt

SITE_VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' epd/__init__.py)
# Once it is there, the site is made without a network.
build/sphinx/.installed: $(STAMP) Makefile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target build/sphinx sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19
	touch $@

site: build/sphinx/.installed ## the documents as a site with search and the Python API, in build/site; fails where a link is dead
	PYTHONPATH=build/sphinx $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site . build/site/$(SITE_VERSION)
	$(BIN)/python docs/site/versions.py build/site
	$(BIN)/python docs/site/links.py build/site

bench: $(STAMP) ## run the benchmarks; results go to benchmarks/results
	for b in serving.batch elasticity.elasticity encode.encode engine.engine front.hops planning.planner reduction.reduction reduction.retention serving.roles serving.serve video.video_decode; do $(BIN)/python -m benchmarks.$$b || exit 1; done

score: $(STAMP) ## what the simulator predicts against live runs; nothing else may run meanwhile
	$(BIN)/python -m benchmarks.score

# Not in the environment of the repository: with the torch, triton and transformers that the GPU machine has.
gpu: ## check and measure on one GPU; needs neither PyAV nor Ray (how long: CONTRIBUTING.md)
	$(PYTHON) -m benchmarks.gpu

gpu-dry: $(STAMP) ## the same in tiny, on the CPU
	$(BIN)/python -m benchmarks.gpu --dry-run

clean: ## remove the environment and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
