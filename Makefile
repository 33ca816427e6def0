# flexslurm: the everyday commands. Each makes what it needs first; `make` alone lists them.

SHELL := /bin/bash
BIN := .venv/bin
EVERYDAY := not slow and not long
SLOW := slow and not long and not sandbox
SLURM := sandbox and not long

.PHONY: help venv lint style types layers pytest test test-slurm test-all bench demo pages clean

help:  ## list these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv:  ## make or update .venv (and, as root on Debian, install Slurm for the sandbox)
	@tools/setup

lint: style types layers  ## style, types, layers

style: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

layers: venv
	$(BIN)/lint-imports

pytest: venv  ## the everyday tests alone
	tools/pytest -m "$(EVERYDAY)"

test: lint pytest  ## style, types, layers, the everyday tests and the slow ones
	JOBS=2 tools/pytest -m "$(SLOW)"

test-slurm: venv  ## all that Slurm may do to running streams, on a real one (a quarter of an hour)
	tools/pytest -m "$(SLURM)"

test-all: lint  ## all tests, the long ones too, and more examples of each property
	HYPOTHESIS_PROFILE=thorough tools/pytest

bench: venv  ## the benches, one by one
	@. tools/env.sh && $(BIN)/python tools/bench

demo: venv  ## serve a small model, lose a node, go on [JSON=FILE]
	@. tools/env.sh && $(BIN)/flexslurm demo $(if $(JSON),--json $(JSON))

pages: venv  ## make anew what pages say of the code's own tables
	$(BIN)/python tools/pages

clean:  ## remove what the commands made here (not .venv, not prepared models)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	rm -rf .cache/triton .cache/torch-extensions .cache/matplotlib .cache/*.log
	find flexslurm tests -name __pycache__ -prune -exec rm -rf {} +
