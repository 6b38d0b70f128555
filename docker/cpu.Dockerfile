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

WORKDIR /hilgate
COPY requirements requirements
# The secret is this machine's pip configuration (index, certificates): it is mounted, never in a layer.
# A layer for each part: while buildah makes one, what it holds is on disk three times.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf PIP_NO_CACHE_DIR=1 requirements/install.sh /opt/venv python3 pip torch
# hadolint ignore=DL3059
RUN --mount=type=secret,id=pip,target=/etc/pip.conf PIP_NO_CACHE_DIR=1 requirements/install.sh /opt/venv python3 packages
# hadolint ignore=DL3059
RUN --mount=type=secret,id=pip,target=/etc/pip.conf PIP_NO_CACHE_DIR=1 requirements/install.sh /opt/venv python3 serving
# hadolint ignore=DL3059
RUN --mount=type=secret,id=pip,target=/etc/pip.conf PIP_NO_CACHE_DIR=1 requirements/install.sh /opt/venv python3 second
# hadolint ignore=DL3059
RUN --mount=type=secret,id=pip,target=/etc/pip.conf PIP_NO_CACHE_DIR=1 requirements/install.sh /opt/venv python3 docs
# hadolint ignore=DL3059
RUN --mount=type=secret,id=pip,target=/etc/pip.conf PIP_NO_CACHE_DIR=1 requirements/install.sh /opt/venv python3 next

# Our own sources are in no image: a job's workspace has them. What vLLM finds the plugin by is here.
COPY kernels/pyproject.toml docker/scripts/entry-points.sh pins.json docker/prove.py /opt/image/
# The proof starts as the gate starts: no network, no GPU.
RUN /opt/image/entry-points.sh /opt/venv/bin/python /opt/image/pyproject.toml \
    && TRITON_INTERPRET=1 HF_HUB_OFFLINE=1 /opt/venv/bin/python /opt/image/prove.py cpu /opt/image/proof.json

ENV PATH=/opt/venv/bin:$PATH OMP_NUM_THREADS=1
