# `make` lists the targets. Everything is set up inside this folder: .venv, .triton, .cache.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
MODELS ?= model_repository
LOADTEST ?= --auto-rate --shape steps --duration-s 40 --report loadtest-report
export ORT_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup models demo serve test lint bench loadtest lock clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.installed ## Install the packages and fetch the Triton server
	@$(BIN)/ortgraph fetch

$(VENV)/.installed: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON); install Python 3.11 or newer, or name one with PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Python 3.11, 3.12 or 3.13 is needed, this is %d.%d; name another with PYTHON=python3.x" % v)'
	@echo "Installing packages into $(VENV) (a minute or two the first time)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 cannot make a virtual environment; install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

models: setup ## Build the sample models (weights are fetched once)
	@$(BIN)/python -m models

demo: models ## Serve the sample models, ask them, load them for ten seconds, stop
	@$(BIN)/python -m examples.demo

serve: models ## Serve until Ctrl-C (HOST, HTTP_PORT, GRPC_PORT, METRICS_PORT, MODELS=folder)
	@$(BIN)/ortgraph serve -m "$(MODELS)" --host $(HOST) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)

test: lint models ## Run the linters and all tests
	@$(BIN)/python -m pytest

lint: setup ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: models ## Compare with a plain session.run model.py on this CPU
	@$(BIN)/python -m benchmarks cpu

loadtest: models ## Load the sample model in steps, write loadtest-report/ (LOADTEST="--url host:port --rate 50 ..." for another)
	@$(BIN)/python -m loadtest $(LOADTEST)

lock: ## Pin every package anew (needs uv)
	@uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet --output-file requirements.lock

clean: ## Remove everything that make made
	rm -rf $(VENV) .triton .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis model_repository/*/1/model.onnx model_repository/text_embedding/tokenizer.json model_repository/text_recognition/labels.txt
