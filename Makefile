# Makes the environment and calls hilgate or pytest in it. Steps are declared in ci/areas/, nowhere else.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Where it is set, every process compiles what it imports once more; .gitignore has what is written.
export PYTHONDONTWRITEBYTECODE =
# Else each step would get it, and no pass of `make test` would count for `make gate ARGS=--all`.
unexport ARGS
READY := $(VENV)/.ready

.PHONY: gate test image extensions setup lock clean

gate: $(READY)  ## plan, run, judge, report: what changed, else a smoke run; ARGS=--all runs everything
	@HILGATE_GATE="make gate ARGS=" $(VENV)/bin/hilgate gate $(ARGS)

# Steps that are tests, start no engine and compile for no AMD GPU. What passes here the next `make gate` of this clone reuses.
TESTS := pages units images-units kernels amdgcn-oracles routing mamba-kernels

test: $(READY)  ## the tests that start no engine, and the ten slowest of them; ARGS names files for plain pytest
ifeq ($(ARGS),)
	@$(VENV)/bin/hilgate run --slowest 10 $(TESTS)
else
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --durations=10 $(ARGS)
endif

image: $(READY)  ## build the CPU image, or find it built (docker buildx, or root with buildah and debootstrap)
	@$(VENV)/bin/python -m hilgate.images build cpu

extensions: $(READY)  ## compile the ROCm image's extensions for AMD without ROCm, and compare; ARGS=--sample, --record
	@$(VENV)/bin/python -m hilgate.images extensions $(ARGS)

setup: $(READY)

# Rebuilt when a pin changes; written last, so an interrupted installation is not mistaken for a finished one.
$(READY): $(wildcard requirements/*.txt requirements/evals.in) requirements/install.sh pyproject.toml kernels/pyproject.toml evals/pyproject.toml
	@requirements/install.sh $(VENV) $(PYTHON)
	@touch $@

lock:  ## recompile requirements/*.txt from the .in files (needs uv)
	@requirements/lock.sh

clean:
	rm -rf $(VENV) .triton results
