# Makes the environment and calls hilgate or pytest in it. Steps are declared in ci/areas/, nowhere else.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TORCH_INDEX ?=
# Unset, so that Python caches compiled files (git ignores them).
export PYTHONDONTWRITEBYTECODE =
# ARGS is not exported: it is no part of the environment, which `--resume` compares with that of the run it continues.
unexport ARGS
.PHONY: gate test rest image lock-image extensions setup next lock clean wheels docs docs-serve

gate: setup  ## plan, run, judge, report: what changed, else the quick steps; ARGS=--all runs everything
	@HILGATE_GATE="make gate ARGS=" "$(VENV)/bin/hilgate" gate $(ARGS)

# Tests that start no engine, drive no attention backend of vLLM, compile for no AMD GPU and play no attack.
TESTS := pages units-ci units-release units-agent units-evals units-audit units-benchmarks routing images-units kernels-cache \
	kernels-attention kernels-mla kernels-semantics kernels-gdn kernels-ssd amdgcn-oracles mamba-kernels

test: setup  ## the tests that start no engine, and the ten slowest of them; ARGS names files for plain pytest
ifeq ($(ARGS),)
	@"$(VENV)/bin/hilgate" run --slowest 10 $(TESTS)
else
	@OMP_NUM_THREADS=1 "$(VENV)/bin/python" -m pytest --durations=10 $(ARGS)
endif

rest: setup  ## what `make gate ARGS=--all` runs and `make test` does not
	@HILGATE_GATE="make gate ARGS=" "$(VENV)/bin/hilgate" gate --all $(TESTS:%=--except %)

image: setup  ## build the CPU image, or find it built (docker buildx, or root with buildah and debootstrap)
	@"$(VENV)/bin/python" -m hilgate.images build cpu

lock-image: setup  ## read the pins that docker/pins.toml still lacks, write them and show the difference (needs a network)
	@"$(VENV)/bin/python" -m hilgate.images pins --fill

extensions: setup  ## compile the ROCm image's extensions for AMD without ROCm; ARGS=--sample: one unit
	@"$(VENV)/bin/python" docker/compile_extensions.py $(ARGS)

# Takes a tenth of a second when all is installed: it compares a digest of the pins, not the times of files.
setup:  ## make the environment, or find it made; TORCH_INDEX=URL names the index that torch comes from
	@TORCH_INDEX="$(TORCH_INDEX)" requirements/install.sh "$(VENV)" "$(PYTHON)"

next: setup  ## the next Triton and vLLM (requirements/next.in), for the steps `next-*`: 1.3 GB in .triton/next
	@requirements/install.sh "$(VENV)" "$(PYTHON)" next

docs: setup  ## build the documentation into results/site/; a dead link or an undocumented name fails
	@"$(VENV)/bin/python" docs/reference.py
	@NO_MKDOCS_2_WARNING=1 "$(VENV)/bin/python" -m mkdocs build --strict

docs-serve: setup  ## serve the documentation, and build it again after each edit
	@"$(VENV)/bin/python" docs/reference.py
	@NO_MKDOCS_2_WARNING=1 "$(VENV)/bin/python" -m mkdocs serve

wheels: setup  ## build the three wheels twice, compare their bytes, install and try each: results/wheels/wheels/
	@"$(VENV)/bin/python" -m hilgate.release.wheels . kernels evals

lock:  ## recompile requirements/*.txt and docker/*.txt from the .in files (needs uv)
	@requirements/lock.sh
	@docker/lock.sh

clean:
	rm -rf "$(VENV)" .triton results
