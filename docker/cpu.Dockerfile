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
# The secret is this machine's pip configuration (index, certificates): it is mounted, never in a layer.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    PIP_NO_CACHE_DIR=1 requirements/install.sh /opt/venv python3

COPY pyproject.toml ./
COPY ci ci
COPY kernels kernels
COPY evals evals
COPY pins.json docker/prove.py docker/scripts/proof-cpu.sh /opt/image/
# Pages are no part of the image, and hilgate's distribution wants one.
RUN touch README.md \
    && /opt/venv/bin/python -m pip install --quiet --no-index --no-deps --no-build-isolation \
        --editable . --editable ./kernels --editable ./evals \
    && /opt/image/proof-cpu.sh /opt/venv

ENV PATH=/opt/venv/bin:$PATH OMP_NUM_THREADS=1
