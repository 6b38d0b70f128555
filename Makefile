# Makes the environment and calls hilgate or pytest in it. Steps are declared in ci/areas/, nowhere else.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TORCH_INDEX ?=
# Where it is set, every process compiles what it imports once more; .gitignore has what is written.
export PYTHONDONTWRITEBYTECODE =
# Else each step would get it, and no pass of `make test` would count for `make gate ARGS=--all`.
unexport ARGS
.PHONY: gate test image extensions setup lock clean

gate: setup  ## plan, run, judge, report: what changed, else a smoke run; ARGS=--all runs everything
	@HILGATE_GATE="make gate ARGS=" "$(VENV)/bin/hilgate" gate $(ARGS)

# Steps that are tests, start no engine and compile for no AMD GPU. What passes here the next `make gate` of this clone reuses.
TESTS := pages units images-units kernels amdgcn-oracles routing mamba-kernels

test: setup  ## the tests that start no engine, and the ten slowest of them; ARGS names files for plain pytest
ifeq ($(ARGS),)
	@"$(VENV)/bin/hilgate" run --slowest 10 $(TESTS)
else
	@OMP_NUM_THREADS=1 "$(VENV)/bin/python" -m pytest --durations=10 $(ARGS)
endif

image: setup  ## build the CPU image, or find it built (docker buildx, or root with buildah and debootstrap)
	@"$(VENV)/bin/python" -m hilgate.images build cpu

extensions: setup  ## compile the ROCm image's extensions for AMD without ROCm, and compare; ARGS=--sample, --record
	@"$(VENV)/bin/python" -m hilgate.images extensions $(ARGS)

# In a tenth of a second where everything is installed: what decides is a digest of the pins and not the times of files.
setup:  ## make the environment, or find it made; TORCH_INDEX=URL names the index that torch comes from
	@TORCH_INDEX="$(TORCH_INDEX)" requirements/install.sh "$(VENV)" "$(PYTHON)"

lock:  ## recompile requirements/*.txt from the .in files (needs uv)
	@requirements/lock.sh

clean:
	rm -rf "$(VENV)" .triton results
