# What `make gate` uses, as an image: Debian's Python and the environment of requirements/install.sh.
# BASE is debian at a digest (docker), or a folder made by debootstrap where there is no registry (buildah).
ARG BASE
# the digest is in BASE: pins.toml, cpu.base
# hadolint ignore=DL3006
FROM ${BASE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

ARG PACKAGES
COPY docker/scripts/apt.sh /opt/image/
# a list of words
# hadolint ignore=SC2086
RUN /opt/image/apt.sh ${PACKAGES}

# Requirements alone first: a change to a kernel reuses this layer, which is the one that takes minutes.
WORKDIR /hilgate
COPY requirements requirements
COPY pyproject.toml ./
# The secret is this machine's pip configuration (index, certificates): it is mounted, never in a layer.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    mkdir -p ci/hilgate kernels/pagedkv evals/hileval evals/families && touch README.md \
    && PIP_NO_CACHE_DIR=1 requirements/install.sh /opt/venv python3

COPY ci ci
COPY kernels kernels
COPY evals evals
COPY pins.json docker/prove.py docker/scripts/proof-cpu.sh /opt/image/
# Again, now that there are packages to point at.
RUN /opt/venv/bin/python -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . \
    && /opt/image/proof-cpu.sh /opt/venv

ENV PATH=/opt/venv/bin:$PATH OMP_NUM_THREADS=1
