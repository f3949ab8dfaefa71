# make demo | test | test-slurm | lint | bench | torture | venv. Everything runs in .venv, which is built from constraints.txt.

VENV := .venv
BIN := $(VENV)/bin
PINS := $(VENV)/.pins
PIP := $(BIN)/python -m pip
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
DEMO_DEVICES ?= 1
PYTEST_ARGS ?=
TORTURE_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test test-slurm lint format bench torture

help:
	@sed -n '1p' Makefile

# Reused as long as the pins are the same: $(PINS) is a copy of the files that decide what is installed.
venv:
	@if cat constraints.txt pyproject.toml | cmp -s - $(PINS); then exit 0; fi; \
	set -e; \
	if [ ! -x $(BIN)/python ]; then \
		python=; \
		for candidate in $(PYTHON) python3.11 python3.12 python3; do \
			if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then echo "error: Python 3.11 or newer is needed; give it with PYTHON=" >&2; exit 1; fi; \
		echo "setting up $(VENV) with $$($$python --version)"; \
		$$python -m venv $(VENV); \
	fi; \
	$(PIP) install --quiet --constraint constraints.txt setuptools; \
	$(PIP) install --quiet --no-deps '$(TORCH)' || $(PIP) install --quiet --no-deps --index-url $(TORCH_INDEX) '$(TORCH)'; \
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'; \
	cat constraints.txt pyproject.toml > $(PINS)

demo: venv
	@$(BIN)/aligner demo --devices $(DEMO_DEVICES)

test: venv
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_ARGS); code=$$?; \
	case $$code in \
		0|1) ;; \
		2) echo "error: the test run was interrupted, or test files could not be imported" >&2 ;; \
		3) echo "error: pytest itself failed" >&2 ;; \
		4) echo "error: pytest was called wrongly; see PYTEST_ARGS" >&2 ;; \
		5) echo "error: no tests were collected" >&2 ;; \
		*) echo "error: pytest ended with code $$code (above 128: killed by signal code - 128)" >&2 ;; \
	esac; \
	exit $$code

# Needs root and Debian's slurmctld slurmd slurm-client munge: it starts a cluster of simulated nodes on this machine.
test-slurm: venv
	@ALIGNER_SLURM_TESTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slurm $(PYTEST_ARGS)

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff check --quiet --target-version py312 .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/hadolint docker/Dockerfile.*
	@$(BIN)/shellcheck .ci/run $(wildcard docker/*.sh slurm/*.sh tests/slurm/*.sh)

format: venv
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: venv
	@$(BIN)/python -m tests.benchmarks

torture: venv
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture $(TORTURE_ARGS)
