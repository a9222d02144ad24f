# Each target makes the virtual environment first, so each is one command on a fresh machine.
#   FASTAUG_VENV   where the environment is (default: .venv)
#   PYTHON         what it is made with (default: python3)

FASTAUG_VENV ?= .venv
PYTHON ?= python3
BIN := $(FASTAUG_VENV)/bin
# Names what is installed: the requirements, this folder (the install is editable) and the Python.
INSTALLED := $(FASTAUG_VENV)/.installed-$(shell { cat setup.py pyproject.toml constraints.txt; pwd; $(PYTHON) --version; } | cksum | tr ' ' -)

.PHONY: help train test test-all test-slow bench paper-mini paper-small check docs dist install clean

help:
	@echo "make train   train on the built-in data set with and without the regularizer and compare, in under 2 minutes on two cores"
	@echo "make test    unit and integration tests, in about 5 minutes on two cores"
	@echo "make test-all  all tests: those, emulated GPU code, benchmarks and stress, in about 12 minutes"
	@echo "make bench   images per second versus K and what GPUs should do, quick forms, in about 2 minutes"
	@echo "make paper-mini  how the paper's claims are checked, on the built-in data or DATA=CIFAR-LIKE-FOLDER, in ten minutes"
	@echo "make paper-small DATA=cifar10-16.npz  the runs of docs/paper.md that the record does not have yet, about 6 hours for all; resumable"
	@echo "make check   ruff, ruff format --check, mypy"
	@echo "make docs    build the documentation into build/site; a broken link fails"
	@echo "make dist    build the sdist and the wheels into dist/, and check them"
	@echo "make install make the virtual environment ($(FASTAUG_VENV)) and install fastaug into it"
	@echo "make clean   remove $(FASTAUG_VENV) and caches of the tools"

# Two trainings that differ only in the regularizer, then the report about both. DEMO is their folder.
train: DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)
train: $(INSTALLED)
	$(BIN)/python -m fastaug.train --dali $(ARGS) --out $(DEMO)/with-kl
	$(BIN)/python -m fastaug.train --dali $(ARGS) --kl-weight 0 --out $(DEMO)/without-kl
	$(BIN)/python -m fastaug.report $(DEMO)

# Workers share one kernel cache (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
test: $(INSTALLED)
	$(PYTEST) tests/unit tests/integration $(ARGS)

test-slow: $(INSTALLED)
	$(PYTEST) tests/gpu_code tests/benchmarks tests/stress $(ARGS)

test-all: test test-slow

# Beside the committed results, not into them: those are of full runs.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/throughput.py --quick --out runs/bench $(ARGS)
	$(BIN)/python benchmarks/predict.py --quick --out runs/bench
	$(BIN)/python benchmarks/predict.py --check runs/bench/throughput.csv --out runs/bench

# MINI is where the runs and the report are; the same command continues them.
MINI ?= runs/paper-mini
paper-mini: $(INSTALLED)
ifdef DATA
	$(BIN)/python -m fastaug.sweep mini-cifar --dali --data $(DATA) --out $(MINI)/cifar $(ARGS)
else
	$(BIN)/python -m fastaug.sweep mini-shapes --dali --out $(MINI)/shapes $(ARGS)
endif
	$(BIN)/python -m fastaug.report $(MINI)

paper-small: $(INSTALLED)
	$(BIN)/python benchmarks/paper_small.py --data "$(DATA)" $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages from the code are written first. No --quiet: with it --strict would not see the warnings.
docs: $(INSTALLED)
	$(BIN)/python docs/generate_flags.py
	$(BIN)/python docs/generate_layouts.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheels are built from the sdist, so that no stray file of the tree helps. Without a compiler for
# a machine, there is no wheel for it.
WHEEL := $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --sdist --no-isolation --outdir dist
	FASTAUG_TARGET=any $(WHEEL) dist/fastaug-*.tar.gz
	FASTAUG_TARGET=x86_64 $(WHEEL) dist/fastaug-*.tar.gz || echo "dist/ has no wheel for x86_64"
	FASTAUG_TARGET=aarch64 $(WHEEL) dist/fastaug-*.tar.gz || echo "dist/ has no wheel for aarch64"
	$(BIN)/python -m twine check --strict dist/*

install: $(INSTALLED)

$(INSTALLED):
	@echo "installing into $(FASTAUG_VENV): about 2 minutes and 7 GB, most of it torch's CUDA libraries"
	@$(PYTHON) -m venv $(FASTAUG_VENV)
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable ".[dev]"
	@rm -f $(FASTAUG_VENV)/.installed-*
	@touch $@

clean:
	rm -rf $(FASTAUG_VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
