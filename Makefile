# Everything a newcomer needs: `make demo` shows it working, `make test` proves it.
# Each target sets up what it needs first; what stands already takes no time.
.DEFAULT_GOAL := help
.PHONY: help setup dev demo serve test test-fast test-gpu-compile lint parity bench bench-gpu clean

PYTHON := .venv/bin/python
PORT := 8000

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-17s %s\n", $$1, $$2 }'

setup:  ## .venv with what jprefill needs to run (CPU)
	@scripts/setup

dev:  ## .venv with the test and lint tools too
	@scripts/setup dev

demo:  ## start a server on a small real model, ask three questions, stop it
	@scripts/setup demo
	@scripts/demo_model
	@$(PYTHON) scripts/demo.py

serve:  ## serve the small model on port 8000 (PORT=...) and print a curl to paste
	@scripts/setup demo
	@scripts/demo_model
	@$(PYTHON) scripts/serve.py $(PORT)

test:  ## every test, as CI runs it
	@scripts/setup dev
	@scripts/demo_model
	@$(PYTHON) -m pytest

test-fast:  ## tests that need neither the model nor patience
	@scripts/setup dev
	@$(PYTHON) -m pytest -m "not slow and not model and not gpu and not gpu_compile"

test-gpu-compile:  ## compile every program for L4, A100 and H100, no GPU needed (brings 0.7 GB of compiler)
	@scripts/setup dev plan
	@$(PYTHON) -m pytest -m gpu_compile

lint:  ## ruff check, ruff format --check, pyright
	@scripts/setup dev
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/pyright

parity:  ## compare with Hugging Face on the same prompts
	@scripts/setup dev
	@scripts/demo_model
	@scripts/parity

bench:  ## time prefill on this machine, next to Hugging Face
	@scripts/setup dev
	@scripts/demo_model
	@scripts/peer_env
	@.venv/bin/jprefill bench offline --peer hf

bench-gpu:  ## the 8-minute GPU run; ARGS=--tiny tries the script on a CPU (bench/results/README.md)
	@bench/gpu/run.sh $(ARGS)

clean:  ## remove environments, caches and checkpoints
	rm -rf .venv .venv-* .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info checkpoints/smollm2-*
