# flexslurm: the everyday commands. Each makes what it needs first; `make` alone lists them.

SHELL := /bin/bash
BIN := .venv/bin
JOBS ?= $(shell n=$$(nproc); echo $$(( n > 4 ? 4 : n )))
PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadgroup

# What libraries would write below the home directory goes below the checkout.
export DS_BUILD_OPS := 0
export TRITON_HOME := $(CURDIR)/.cache
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch-extensions
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib

.PHONY: help venv lint pytest test test-all bench demo clean

help:  ## list these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv:  ## make or update .venv (and, as root on Debian, install Slurm for the sandbox)
	@tools/setup

lint: venv  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

pytest: venv  ## the everyday tests alone
	$(PYTEST) -m "not slow"

test: lint pytest  ## the everyday checks and tests

test-all: lint  ## all tests, and more examples of each property
	HYPOTHESIS_PROFILE=thorough $(PYTEST)

bench: venv  ## the benches, one by one
	$(BIN)/python tools/bench

demo: venv  ## serve a small model, lose a node, go on [JSON=FILE]
	@$(BIN)/flexslurm demo $(if $(JSON),--json $(JSON))

clean:  ## remove what the commands made here (not .venv, not prepared models)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	rm -rf .cache/triton .cache/torch-extensions .cache/matplotlib .cache/apt.log
	find flexslurm tests -name __pycache__ -prune -exec rm -rf {} +
