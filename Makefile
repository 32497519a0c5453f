# Every target sets up what it needs, prints what it does, and can be repeated or interrupted.
#   PYTHON=python3.12  another interpreter (its environment is .venv-<name>); default: the newest that works, in .venv
SHELL := /bin/bash
PYTHON ?=
VENV := $(if $(PYTHON),.venv-$(notdir $(PYTHON)),.venv)
PY := $(VENV)/bin/python
WORKDIR ?= runs/native
# Compiled programs are kept between runs.
export JAX_COMPILATION_CACHE_DIR ?= $(HOME)/.cache/msa_jax/jax
export JAX_COMPILATION_CACHE_MAX_SIZE ?= 4294967296
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.2

.PHONY: help train test test-slow test-kernels lint data bench setup
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## make the virtual environment and install the project
	@scripts/setup.sh $(VENV) $(PYTHON)

data: setup ## build the small data pack (pip packages only)
	@$(PY) -m msa_jax.data.build small --out data/small

# A step's temporary arrays are mapped anew each time; in pages of 4 KiB a sixth of a CPU's work would be page faults (glibc >= 2.35).
train bench: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
train: data ## train configs/native.py in its CPU size and print what it learned
	$(PY) train.py --config configs/native.py --workdir "$(WORKDIR)"

lint: setup ## ruff: style and format
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

test: lint ## fast tests on one interpreter
	$(PY) -m pytest -q -n auto --maxprocesses 8 --durations 15

test-slow: data ## kills and resumes, the pinned data pack, smoke runs of every config
	$(PY) -m pytest -q -m slow -n auto --maxprocesses 8 --durations 15

test-kernels: setup ## GPU kernels without a GPU: simulator with race detection, ptxas where it is installed; many minutes
	$(PY) -m pytest -q -m kernels --durations 15

bench: setup ## CPU benchmark of the attention ops: ratios against dense attention
	$(PY) benchmarks/attention_cpu.py
