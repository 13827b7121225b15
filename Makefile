# `make help` lists the targets. docs/ci.md says what the set-up does, docs/building.md how to build without it.
SHELL := bash
PYTHON ?= python3
export PYTHON
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run serve setup test test-cpp test-arm test-windows test-python test-slow fuzz test-sanitize test-wheel test-kernels test-sim test-sim-full test-triton test-second-torch test-clients bench matrix docs format lint clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: setup ## Set up, build, and train a small GPT (ARGS="--steps 100 --device cpu" ...)
	.venv/bin/python examples/train_gpt.py $(ARGS)

serve: setup ## Serve many requests over a paged cache with the model of `make run`, or a small one trained first
	.venv/bin/python examples/serve_paged.py $(ARGS)

setup: ## Set up .venv and install the package into it
	tools/setup.sh run
	@echo "compiling (some minutes the first time)"
	.venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --no-input -e .

test: ## Lint, build and all tests on .venv
	tools/test.sh

lint: ## Formatting and lint
	tools/test.sh lint

test-cpp: ## C++ tests
	tools/test.sh build cpp

test-arm: ## The C++ tests compiled for 64-bit ARM and executed by QEMU
	tools/test.sh arm

test-windows: ## The C++ tests compiled for 64-bit Windows and executed by Wine
	tools/test.sh windows

test-python: ## Python tests (PYTEST_ARGS="-k softcap" ...)
	tools/test.sh build python

test-sanitize: ## C++ tests under ASan + UBSan, and those of threads under TSan
	tools/test.sh sanitize

test-wheel: ## `pip install .` with build isolation, used away from the source tree
	tools/test.sh wheel

test-kernels: ## The AMD kernels' registers, spills and size, and the simulator's own tests
	tools/test.sh build kernels

test-sim: ## The AMD kernels, launched from torch, executed by the simulator
	tools/test.sh build kernels simulation

test-sim-full: ## The same with the full product of features, in random wave orders; takes hours
	PYTEST_ARGS="--full $(PYTEST_ARGS)" tools/test.sh build kernels simulation

test-triton: ## The Triton backend's suite in Triton's interpreter, and its kernels compiled for AMD's GPUs
	tools/test.sh build triton

test-second-torch: ## The stated subset of the Python tests on Debian's torch
	tools/test.sh second-torch

test-clients: ## transformers, diffusers and other clients on the CPU; downloads them
	tools/test.sh build clients

test-slow: ## The wide sweeps too; takes long
	PYTEST_ARGS="--full $(PYTEST_ARGS)" tools/test.sh build python

fuzz: ## 10,000 random steps of a paged kv cache (FLASH_ATTN_FUZZ_STEPS each, FLASH_ATTN_FUZZ_EXAMPLES times), and made-up problems against the oracle
	tools/test.sh build fuzz

bench: setup ## Times against torch's own attention
	.venv/bin/python benchmarks/attention.py --device cpu --against torch $(ARGS)

matrix: ## Run the Python tests and rewrite README.md's support matrix from their results
	tools/test.sh build python kernels simulation triton write-matrix

docs: ## The documentation's site, into build/site
	tools/setup.sh test
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

format: ## Rewrite the sources in the project's format
	tools/setup.sh test
	tools/lint.sh --fix

clean: ## Remove build trees and what was built into the package; keeps the environments
	rm -rf build dist out flash_attn/lib *.egg-info
