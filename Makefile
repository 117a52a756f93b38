# Thin names for scripts/; `make` alone lists them.
PROMPT ?= Explain in two sentences why the sky is blue.
export PROMPT

.DEFAULT_GOAL := help
.PHONY: help install run test check lint bench docs clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: ## the package and its tools into .venv
	@scripts/install

run: ## ask the demo model, beside the unaccelerated original: make run PROMPT="..."
	@scripts/install demo
	@.venv/bin/slipstream generate --model demo --compare "$$PROMPT"

test: install ## every test; families also with the oldest transformers, GPU kernels with two versions of Triton
	@scripts/test

check: install ## lint, format and types
	@scripts/check

lint: install ## apply the mechanical fixes
	@scripts/lint

bench: install ## the benchmarks: make bench ARGS="..."
	@scripts/bench $(ARGS)

docs: install ## write the parts of the documentation that are made from the code
	@.venv/bin/python scripts/generate_docs

clean: ## remove the environment, caches and builds
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
