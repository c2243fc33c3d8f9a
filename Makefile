# make train: the default model from a clone; make test: every test of the quick half. README.md says more.
#
# Variables, each for `make TARGET NAME=value`:
#   PYTHON     the interpreter of .venv, 3.11 or newer
#   TORCH_CPU  where pip finds PyTorch's CPU build, for an x86 machine with no NVIDIA GPU: a folder or a page of wheels,
#              or pip options (an index option, say). Not needed where pip's own settings know such a place.
#   RUN        run folder of `make train`
#   ARGS       more arguments of `fmengine train`, for example "--set model.family=neox"
#   LOCK_FLAGS more arguments of pip-compile in `make lock`, and of uv in `make locks`: --upgrade takes the newest versions
#   VARIANT    of `make image`: cuda13, cuda12 or cpu; IMAGE, BASE, SECRETS, WHEELS, JOBS: see containers/build.sh; ARGS too
#   FROM       of `make sif`: where the image is, docker-daemon by default, or mirrors to do without Docker; IMAGE, MKSQUASHFS:
#              see containers/sif.sh. SIF is the file that it makes

PYTHON ?= python3
TORCH_CPU ?=
RUN ?= runs/default
ARGS ?=
LOCK_FLAGS ?=
VARIANT ?=
FROM ?= docker-daemon
SIF ?= build/images/fmengine-$(VARIANT).sif

TORCH_VERSION := 2.13.0
VENV := .venv
BIN := $(VENV)/bin
# What the cpu image runs with, what its build needs besides, and the developer's tools.
LOCKS := $(addprefix containers/locks/,cpu.txt cpu-build.txt dev.txt)
DONE := $(VENV)/done
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
GPU := $(shell { test -e /proc/driver/nvidia/version || test -e /dev/nvidia0 || nvidia-smi -L; } >/dev/null 2>&1 && echo yes)
SHELL_SCRIPTS = $(shell git ls-files '*.sh' .ci/run)
pin = $(shell sed -n 's/^$1=//p' containers/versions.env)
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
.PHONY: train test test-all test-images gpu-test image sif check format lock locks install clean

train: install
	$(BIN)/fmengine train --set run.dir=$(RUN) $(ARGS)
	$(BIN)/fmengine export $(RUN) --out $(RUN)/export --force
	$(BIN)/fmengine generate $(RUN) --prompt "def main("

test: install
	$(BIN)/python tests/run.py

test-all: install
	$(BIN)/python tests/run.py --all

# Needs root on Debian 12: it starts a dockerd of its own and builds the images that it tests.
test-images: install
	$(BIN)/python -m pytest tests/image

gpu-test: install
	$(BIN)/python -m pytest tests/gpu

image:
	containers/build.sh "$(VARIANT)" $(ARGS)

sif:
	containers/sif.sh "$(VARIANT)" "$(FROM)" "$(IMAGE)" "$(SIF)"

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

# Keeps the versions in the locks where they fit pyproject.toml. Run it on an x86 machine with no GPU. The second run
# starts from the versions of the first and tells what runs from what develops.
PIP_COMPILE = $(BIN)/python -m piptools compile --quiet $(TORCH_FROM) --generate-hashes --strip-extras --no-header \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options --annotation-style line \
	--unsafe-package torch --constraint build/locks/torch.txt
lock: install
	mkdir -p build/locks
	cat $(LOCKS) >build/locks/all.txt
	echo "torch==$(TORCH_VERSION)+cpu" >build/locks/torch.txt
	$(PIP_COMPILE) $(LOCK_FLAGS) --extra dev --output-file build/locks/all.txt pyproject.toml
	cp build/locks/all.txt build/locks/runtime.txt
	$(PIP_COMPILE) --output-file build/locks/runtime.txt pyproject.toml
	$(BIN)/python containers/locks/lock.py split build/locks
	$(PIP_COMPILE) $(LOCK_FLAGS) --output-file containers/locks/sbom.txt containers/locks/sbom.in

# The locks of all image variants: containers/locks/README.md. uv resolves for machines that are not this one; it asks the
# index in UV_DEFAULT_INDEX, pip's settings it does not know.
locks: lock
	rm -rf build/locks/wheels
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version $(call pin,CPU_PYTHON) $(TORCH_FROM) \
		--dest build/locks/wheels "torch==$(call pin,CPU_TORCH)"
	$(BIN)/python -m venv build/locks/venv
	build/locks/venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$(call pin,UV)"
	$(BIN)/python containers/locks/lock.py images build/locks/venv/bin/uv build/locks $(LOCK_FLAGS)

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
$(DONE)/lock: $(LOCKS) $(DONE)/torch-$(TORCH_VERSION)
	cat $(LOCKS) | awk '/^[a-z]/ { keep = /^(setuptools|wheel)==/ } keep' >$(VENV)/build.txt
	@echo "installing, some minutes: the packages of $(LOCKS)"
	$(PIP) --no-deps --require-hashes -r $(VENV)/build.txt
	$(PIP) --no-deps --require-hashes --no-build-isolation $(addprefix -r ,$(LOCKS))
	touch $@

$(DONE)/project: pyproject.toml $(DONE)/lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@
