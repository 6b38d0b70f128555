# The image of the GPU agents: ROCm, torch and Triton of the base, and beside them mamba-ssm, causal-conv1d, aiter and vLLM
# compiled for named architectures from sources by hash or commit. Each wheel is a stage of its own, so that it is built once and
# taken from the registry afterwards (docker-bake.hcl). Every ARG comes from pins.toml; none has a default. Our own sources are
# not in it: a job's workspace has them, so a change to a kernel makes no other image.
ARG BASE

# the digest is in BASE: pins.toml, rocm.base
# hadolint ignore=DL3006
FROM ${BASE} AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
COPY docker/prove.py docker/codeobjects.py /opt/image/
RUN python3 /opt/image/prove.py record /opt/image/base.json

FROM base AS compiler
COPY docker/rocm.txt docker/build.txt /opt/image/
COPY docker/scripts /opt/image/scripts
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/image/scripts/install.sh /opt/image/rocm.txt && /opt/image/scripts/install.sh /opt/image/build.txt
COPY docker/patches /opt/image/docker/patches
WORKDIR /opt/image

FROM compiler AS build-mamba
ARG MAMBA_VERSION
ARG MAMBA_SDIST
ARG MAMBA_ARCHS
ARG MAMBA_PATCHES
# lists of words
# hadolint ignore=SC2086
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    scripts/fetch.sh mamba-ssm "${MAMBA_VERSION}" "${MAMBA_SDIST}" /src/mamba \
    && scripts/unpack.sh /src/mamba/source.tar.gz /src/mamba/tree ${MAMBA_PATCHES} \
    && scripts/wheel-mamba-ssm.sh "${MAMBA_VERSION}" /src/mamba/tree /wheels ${MAMBA_ARCHS}
FROM scratch AS wheels-mamba
COPY --from=build-mamba /wheels /

FROM compiler AS build-conv1d
ARG CONV1D_VERSION
ARG CONV1D_SDIST
ARG CONV1D_ARCHS
ARG CONV1D_PATCHES
# lists of words
# hadolint ignore=SC2086
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    scripts/fetch.sh causal-conv1d "${CONV1D_VERSION}" "${CONV1D_SDIST}" /src/conv1d \
    && scripts/unpack.sh /src/conv1d/source.tar.gz /src/conv1d/tree ${CONV1D_PATCHES} \
    && scripts/wheel-causal-conv1d.sh "${CONV1D_VERSION}" /src/conv1d/tree /wheels ${CONV1D_ARCHS}
FROM scratch AS wheels-conv1d
COPY --from=build-conv1d /wheels /

FROM compiler AS build-aiter
ARG AITER_VERSION
ARG AITER_GIT
ARG AITER_COMMIT
ARG AITER_SUBMODULES
ARG AITER_ARCHS
ARG AITER_PATCHES
# a repository at a commit, with its submodules
# hadolint ignore=DL3020
ADD --keep-git-dir=true ${AITER_GIT} /src/aiter
# lists of words
# hadolint ignore=SC2086
RUN scripts/commit.sh /src/aiter "${AITER_COMMIT}" "${AITER_SUBMODULES}" ${AITER_PATCHES} \
    && scripts/wheel-aiter.sh "${AITER_VERSION}" /src/aiter /wheels ${AITER_ARCHS}
FROM scratch AS wheels-aiter
COPY --from=build-aiter /wheels /

FROM compiler AS build-vllm
ARG VLLM_VERSION
ARG VLLM_SDIST
ARG VLLM_TRITON_GIT
ARG VLLM_TRITON_COMMIT
ARG VLLM_TRITON_SUBMODULES
ARG VLLM_ARCHS
ARG VLLM_PATCHES
# a repository at a commit
# hadolint ignore=DL3020
ADD --keep-git-dir=true ${VLLM_TRITON_GIT} /src/triton
# lists of words
# hadolint ignore=SC2086
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    scripts/fetch.sh vllm "${VLLM_VERSION}" "${VLLM_SDIST}" /src/vllm \
    && scripts/unpack.sh /src/vllm/source.tar.gz /src/vllm/tree ${VLLM_PATCHES} \
    && scripts/commit.sh /src/triton "${VLLM_TRITON_COMMIT}" "${VLLM_TRITON_SUBMODULES}" \
    && mv /src/triton /src/vllm/tree/triton_kernels \
    && scripts/wheel-vllm.sh "${VLLM_VERSION}" /src/vllm/tree /wheels ${VLLM_ARCHS}
FROM scratch AS wheels-vllm
COPY --from=build-vllm /wheels /

FROM base AS image
COPY docker/rocm.txt docker/scripts/install.sh docker/scripts/entry-points.sh kernels/pyproject.toml pins.json /opt/image/
COPY --from=wheels-mamba / /opt/image/wheels/
COPY --from=wheels-conv1d / /opt/image/wheels/
COPY --from=wheels-aiter / /opt/image/wheels/
COPY --from=wheels-vllm / /opt/image/wheels/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/image/install.sh /opt/image/rocm.txt /opt/image/wheels/*.whl && rm -r /opt/image/wheels \
    && /opt/image/entry-points.sh python3 /opt/image/pyproject.toml
ENV HSA_NO_SCRATCH_RECLAIM=1
WORKDIR /hilgate

# The proof may write its findings only: what is proven is the image before it.
FROM image AS proof
RUN python3 /opt/image/prove.py rocm /opt/image/pins.json /opt/image/base.json /opt/image/proof.json

FROM image AS rocm
COPY --from=proof /opt/image/proof.json /opt/image/proof.json
