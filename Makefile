# make train: the default model from a clone; make test: every test of the quick half. README.md says more.
#
# Variables, each for `make TARGET NAME=value`:
#   PYTHON     the interpreter of .venv, 3.11 or newer
#   TORCH_CPU  where pip finds PyTorch's CPU build, for an x86 machine with no NVIDIA GPU: a folder or a page of wheels,
#              or pip options (an index option, say). Not needed where pip's own settings know such a place.
#   RUN        run folder of `make train`
#   ARGS       more arguments of `fmengine train`, for example "--set model.family=neox"
#   LOCK_FLAGS more arguments of pip-compile in `make lock`: --upgrade takes the newest versions

PYTHON ?= python3
TORCH_CPU ?=
RUN ?= runs/default
ARGS ?=
LOCK_FLAGS ?=

TORCH_VERSION := 2.13.0
VENV := .venv
BIN := $(VENV)/bin
LOCK := containers/locks/cpu.txt
DONE := $(VENV)/done
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
GPU := $(shell { test -e /proc/driver/nvidia/version || test -e /dev/nvidia0 || nvidia-smi -L; } >/dev/null 2>&1 && echo yes)
SHELL_SCRIPTS = $(shell git ls-files '*.sh' .ci/run)
DOCKERFILES = $(shell git ls-files Dockerfile '*/Dockerfile')

# A bare place is a folder or a page of wheels; anything that starts with a dash is pip's own option.
TORCH_FROM := $(if $(filter -%,$(firstword $(TORCH_CPU))),$(TORCH_CPU),$(addprefix --find-links ,$(TORCH_CPU)))
ifeq ($(GPU),yes)
# The build of PyPI, which is CUDA's, with the libraries it needs.
TORCH := "torch==$(TORCH_VERSION),!=$(TORCH_VERSION)+cpu"
else ifeq ($(shell uname -m),x86_64)
# Named exactly and without dependencies (they are in the lock), so that the CUDA build can never be pulled.
TORCH := --no-deps $(TORCH_FROM) "torch==$(TORCH_VERSION)+cpu"
else
# PyPI's build for ARM is the CPU's.
TORCH := --no-deps $(TORCH_FROM) "torch==$(TORCH_VERSION)"
endif
NO_TORCH := pip cannot install PyTorch $(TORCH_VERSION)
ifneq ($(GPU),yes)
NO_TORCH += for the CPU: set TORCH_CPU, for example make train TORCH_CPU='--index-url ADDRESS' with the address \
	that https://pytorch.org/get-started/locally names for Linux, Pip, CPU, or TORCH_CPU=FOLDER with the wheel in it
endif

export PATH := $(abspath $(BIN)):$(PATH)

.DELETE_ON_ERROR:
.PHONY: train test test-all gpu-test check format lock install clean

train: install
	$(BIN)/fmengine train --set run.dir=$(RUN) $(ARGS)
	$(BIN)/fmengine export $(RUN) --out $(RUN)/export --force
	$(BIN)/fmengine generate $(RUN) --prompt "def main("

test: install
	$(BIN)/python tests/run.py

test-all: install
	$(BIN)/python tests/run.py --all

gpu-test: install
	$(BIN)/python -m pytest tests/gpu

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck $(SHELL_SCRIPTS)
	$(BIN)/shfmt --diff --indent 4 $(SHELL_SCRIPTS)
	$(if $(DOCKERFILES),$(BIN)/hadolint $(DOCKERFILES))

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/shfmt --write --indent 4 $(SHELL_SCRIPTS)

# Keeps the versions in the lock where they fit pyproject.toml. Run it on an x86 machine with no GPU.
lock: install
	mkdir -p build
	cp $(LOCK) build/lock.txt
	echo "torch==$(TORCH_VERSION)+cpu" >build/torch.txt
	$(BIN)/python -m piptools compile --quiet $(TORCH_FROM) --extra dev --generate-hashes --strip-extras --no-header \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options --annotation-style line \
		--unsafe-package torch --constraint build/torch.txt $(LOCK_FLAGS) --output-file build/lock.txt pyproject.toml
	{ echo "# Made by 'make lock' from pyproject.toml. torch is not in it: the Makefile picks its build."; \
		sed -e '/^$$/,$$d' build/lock.txt; } >build/cpu.txt
	mv build/cpu.txt $(LOCK)

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis

install: $(DONE)/project

$(DONE)/venv:
	@$(PYTHON) -c 'import sys; sys.exit("FMEngine needs Python 3.11 or newer; say which with: make PYTHON=python3.11" \
		if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(DONE)
	touch $@

$(DONE)/torch-$(TORCH_VERSION): $(DONE)/venv
	@echo "installing PyTorch $(TORCH_VERSION) $(if $(GPU),(CUDA),(CPU))"
	@$(PIP) $(TORCH) >$(VENV)/torch.log 2>&1 || { echo "error: $(NO_TORCH); pip's words: $(VENV)/torch.log" >&2; exit 2; }
	touch $@

# DeepSpeed is built from source: what builds it is installed first, by hash like the rest.
$(DONE)/lock: $(LOCK) $(DONE)/torch-$(TORCH_VERSION)
	awk '/^[a-z]/ { keep = /^(setuptools|wheel)==/ } keep' $(LOCK) >$(VENV)/build.txt
	@echo "installing the packages of $(LOCK)"
	$(PIP) --no-deps --require-hashes -r $(VENV)/build.txt
	$(PIP) --no-deps --require-hashes --no-build-isolation -r $(LOCK)
	touch $@

$(DONE)/project: pyproject.toml $(DONE)/lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@
