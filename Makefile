# `make train`, `make align` and `make test` are each all that a fresh machine needs: git, make, a C++ compiler, Python 3.11 or newer with
# venv. PYTHON=/some/python uses that interpreter as it is, without an environment of our own and without pip.

SHELL := /bin/bash
PYTHON3 ?= python3
BACKEND ?= auto
ARGS ?=

ifdef PYTHON
  PY := $(PYTHON)
  READY :=
else
  PY := .venv/bin/python
  READY := .venv/ready
endif

# Where examples/train_parakeet.py leaves what it has trained.
WEIGHTS := examples/output/weights.pt

# Installed beside the interpreter; on PATH where PYTHON is a bare name.
CLANG_FORMAT := $(if $(findstring /,$(PY)),$(dir $(PY)))clang-format
CXX_FILES := $(wildcard torch-ext/*.cpp torch-ext/*.h tdt_loss_*/*.cpp tdt_loss_*/*.h tdt_loss_*/*.cu tdt_loss_*/*.cuh)

# get_kernel("kernels-community/tdt-loss") resolves to this tree.
export LOCAL_KERNELS := kernels-community/tdt-loss=$(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help build train align test test-kernels-ci test-frameworks fuzz sanitize lint format abi report clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: ARGS=... (for train, align, test and fuzz), BACKEND=auto|cpu|cuda|all, PYTHON=... (use it as it is), PYTHON3=... (for .venv)"

build: $(READY)  ## build the kernel for this machine into build/; only what changed is compiled
	$(PY) tools/build_kernel.py --backend $(BACKEND)

train: build  ## train a small Parakeet-TDT on five recordings and read them back
	$(PY) examples/train_parakeet.py $(ARGS)

align: $(WEIGHTS)  ## say when each word of the recordings is said, draw a lattice; trains first if nothing is trained
	$(PY) examples/align_parakeet.py $(ARGS)

# Once trained, a model stays; `make train` trains another.
$(WEIGHTS): | build
	$(PY) examples/train_parakeet.py

test: build  ## run the whole suite
	$(PY) -m pytest $(ARGS)

test-kernels-ci: build  ## run the quick subset that checks a build
	$(PY) -m pytest -m kernels_ci $(ARGS)

test-frameworks: build  ## train inside transformers, NeMo, SpeechBrain and ESPnet, each in an environment of its own; ARGS="nemo" for one
	$(PY) tools/test_frameworks.py $(ARGS)

# N cases of each kind; ARGS="--device cuda --kind valid" and so on, see tests/fuzz.py.
N ?= 1000
fuzz: build  ## fuzz valid and malformed calls, N=... of each, into benchmarks/results
	$(PY) tests/fuzz.py --cases $(N) $(ARGS)

# The runtime of the sanitizers must be in the process before Python is, and libstdc++ with it, or exceptions go by unseen.
SANITIZE := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize=vptr -fno-sanitize-recover=all
SANITIZED = LOCAL_KERNELS=kernels-community/tdt-loss=$(CURDIR)/.build/sanitize \
  LD_PRELOAD=$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libstdc++.so.6) \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
# Of the quick subset, what runs the kernels: neither builds, nor torch.compile, nor transformers.
SANITIZED_TESTS := logprobs lattice gradient loss align align_op rnnt* options occupancy fused* contract autograd

sanitize: $(READY)  ## run the CPU kernels under AddressSanitizer and UBSan: the quick subset and a slice of the fuzzer
	CXX=g++ $(PY) tools/build_kernel.py --backend cpu --cxx-flags="$(SANITIZE)" --output .build/sanitize/build
	$(SANITIZED) $(PY) -m pytest -p no:cacheprovider -m "kernels_ci and not cuda" $(SANITIZED_TESTS:%=tests/test_%.py)
	$(SANITIZED) $(PY) tests/fuzz.py --in-process --cases 400 --seed 2 --kind malformed
	$(SANITIZED) $(PY) tests/fuzz.py --in-process --cases 100 --seed 2 --kind valid

lint: $(READY)  ## check format and style of C++, CUDA and Python
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES)

format: $(READY)  ## format C++, CUDA and Python in place
	$(PY) -m ruff check --fix --exit-zero --quiet .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CXX_FILES)

abi: build  ## check that the built libraries keep to Python's stable ABI
	$(PY) tools/check_abi.py

report: $(READY)  ## put the table and plot of benchmarks/results into the README
	$(PY) benchmarks/report.py

clean:  ## remove what was built; the environment in .venv stays
	rm -rf build .build

.venv/ready: requirements.txt requirements-dev.txt
	@echo "Installing what $^ name into .venv; the first time takes minutes."
	@$(PYTHON3) -m venv .venv
	@.venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check -r requirements-dev.txt
	@touch $@
