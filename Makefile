# Makes the environment and calls hilgate or pytest in it. Steps are declared in ci/areas/, nowhere else.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
READY := $(VENV)/.ready

.PHONY: gate test image setup lock clean

gate: $(READY)  ## plan, run, judge, report: what changed, else a smoke run; ARGS=--all runs everything
	@HILGATE_GATE="make gate ARGS=" $(VENV)/bin/hilgate gate $(ARGS)

PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Files in the order of tests/conftest.py: by size, the bug zoo would come last, and one core would wait for it for minutes.
# Three sessions: what one process cannot do at once (tests/conftest.py says why). ARGS replaces all of them.
# The table of families takes 3 minutes on both cores: `hilgate run models-families`, and a step of the gate.
test: $(READY)  ## the test suite
ifeq ($(ARGS),)
	@$(PYTEST) --ignore=tests/audit --ignore=tests/mamba --ignore=tests/families/test_families.py
	@$(PYTEST) tests/mamba
	@TRITON_INTERPRET=0 $(PYTEST) tests/audit
else
	@$(PYTEST) $(ARGS)
endif

image: $(READY)  ## build the CPU image, or find it built (docker buildx, or root with buildah and debootstrap)
	@$(VENV)/bin/python -m hilgate.images build cpu

setup: $(READY)

# Rebuilt when a pin changes; written last, so an interrupted installation is not mistaken for a finished one.
$(READY): $(wildcard requirements/*.txt requirements/evals.in) requirements/install.sh pyproject.toml kernels/pyproject.toml evals/pyproject.toml
	@requirements/install.sh $(VENV) $(PYTHON)
	@touch $@

lock:  ## recompile requirements/*.txt from the .in files (needs uv)
	@requirements/lock.sh

clean:
	rm -rf $(VENV) .triton results
