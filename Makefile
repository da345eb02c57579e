# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test coverage test-slow lint format audit benchmarks clean

demo: $(INSTALLED)  ## unlearn the embedded model on this machine
	rm -rf demo
	$(BIN)/unteach demo demo

test: $(INSTALLED)  ## the suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist loadfile

coverage: $(INSTALLED)  ## the same, and which lines of src it runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist loadfile --cov --cov-report=term

test-slow: $(INSTALLED)  ## the few tests of ten seconds and more: kill -9, signals, training the embedded models
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --numprocesses auto

lint: $(INSTALLED)  ## ruff check, ruff format, types of src
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

audit: $(INSTALLED)  ## known vulnerabilities of the pinned versions; asks a service on the network
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

benchmarks: $(INSTALLED)  ## side-by-side timings and memory on this machine, printed; on a GPU: benchmarks/all_gpu.py
	$(BIN)/python benchmarks/optimizer.py
	$(BIN)/python benchmarks/vocab_head.py
	$(BIN)/python benchmarks/step.py --tiny
	$(BIN)/python benchmarks/precision.py --tiny
	$(BIN)/python benchmarks/scaling.py --tiny
	$(BIN)/python benchmarks/paper_rows.py --tiny

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "unteach needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage
