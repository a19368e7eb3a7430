# Everything from a fresh clone: each target makes .venv and installs into it what constraints.txt pins.
#   make demo     train and sample a small model on 1, 2, ... ranks of this machine; report in out/demo
#   make test     all tests (those that need a GPU are skipped, with that reason, where there is none)
#   make lint     ruff, mypy, import-linter, clang-format       make format   rewrite to what lint wants
#   make bench    measure on this machine, into out/bench       make soak     many random ops for SOAK_MINUTES
PYTHON ?= python3
EXTRAS ?= test,dev,bench
VENV ?= .venv
SOAK_MINUTES ?= 10
ARGS ?=
# For the tests of the NCCL binding, where torch is a build without CUDA; 300 MB, so that only `make test` installs it.
# Not in constraints.txt: a CUDA build of torch wants exactly the version that it names itself.
NCCL ?= nvidia-nccl-cu13==2.32.3

export FUSED_TP_REQUIRE_NATIVE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
NCCL_STAMP := $(VENV)/installed-nccl
CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
BUILD_TOOLS := setuptools wheel pybind11 ninja

.PHONY: all install demo test lint format bench soak clean
all: test

install: $(STAMP)

# --no-build-isolation: no build environment can then take another torch than the pinned one, and compiler flags name
# the same include folders each time, so that only what changed compiles.
$(STAMP): setup.py csrc/native_build.py pyproject.toml constraints.txt $(CSRC)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt $(BUILD_TOOLS)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	touch $@

$(NCCL_STAMP): $(STAMP)
	$(BIN)/python -c "import nvidia.nccl" 2>/dev/null || $(BIN)/python -m pip install -q "$(NCCL)" || \
		echo "There is no NCCL for this platform; the tests that need it will be skipped."
	touch $@

demo: $(STAMP)
	$(BIN)/fused-tp demo --out out/demo $(ARGS)

test: $(NCCL_STAMP)
	$(BIN)/python -m pytest -q $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run -Werror $(CSRC)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

bench: $(STAMP)
	$(BIN)/fused-tp bench --out out/bench $(ARGS)

soak: $(STAMP)
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) $(ARGS)

clean:
	rm -rf $(VENV) build dist out *.egg-info fused_tp/_c*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
