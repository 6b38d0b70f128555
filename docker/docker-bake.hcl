# Targets of the images. Every variable comes from the environment that `python -m hilgate.images build` makes of pins.toml;
# none has a default, so a build by hand without them stops instead of choosing something.
variable "REVISION" {}
variable "HILGATE_VERSION" {}
variable "STORE" {}
variable "CPU_CONTENT" {}
variable "CPU_BASE" {}
variable "CPU_BASE_NAME" {}
variable "CPU_BASE_DIGEST" {}
variable "CPU_PACKAGES" {}
variable "CPU_SUITE" {}
variable "ROCM_CONTENT" {}
variable "ROCM_BASE" {}
variable "ROCM_BASE_NAME" {}
variable "ROCM_BASE_DIGEST" {}
variable "ROCM" {}
variable "TORCH" {}
variable "TRITON" {}
variable "ARCHS" {}
variable "MAMBA_KEY" {}
variable "MAMBA_VERSION" {}
variable "MAMBA_SDIST" {}
variable "MAMBA_ARCHS" {}
variable "MAMBA_PATCHES" {}
variable "CONV1D_KEY" {}
variable "CONV1D_VERSION" {}
variable "CONV1D_SDIST" {}
variable "CONV1D_ARCHS" {}
variable "CONV1D_PATCHES" {}
variable "AITER_KEY" {}
variable "AITER_VERSION" {}
variable "AITER_GIT" {}
variable "AITER_COMMIT" {}
variable "AITER_SUBMODULES" {}
variable "AITER_ARCHS" {}
variable "AITER_PATCHES" {}
variable "VLLM_KEY" {}
variable "VLLM_VERSION" {}
variable "VLLM_SDIST" {}
variable "VLLM_TRITON_GIT" {}
variable "VLLM_TRITON_COMMIT" {}
variable "VLLM_TRITON_SUBMODULES" {}
variable "VLLM_ARCHS" {}
variable "VLLM_PATCHES" {}

group "default" {
  targets = ["cpu", "rocm"]
}

group "wheels" {
  targets = ["wheels-mamba", "wheels-conv1d", "wheels-aiter", "wheels-vllm"]
}

target "_rocm" {
  dockerfile = "docker/rocm.Dockerfile"
  platforms  = ["linux/amd64"]
  secret     = ["id=pip,env=HILGATE_PIP_CONF"]
  args       = { BASE = ROCM_BASE }
}

target "wheels-mamba" {
  inherits = ["_rocm"]
  target   = "wheels-mamba"
  tags     = ["${STORE}/wheels-mamba:${MAMBA_KEY}"]
  args = {
    MAMBA_VERSION = MAMBA_VERSION
    MAMBA_SDIST   = MAMBA_SDIST
    MAMBA_ARCHS   = MAMBA_ARCHS
    MAMBA_PATCHES = MAMBA_PATCHES
  }
}

target "wheels-conv1d" {
  inherits = ["_rocm"]
  target   = "wheels-conv1d"
  tags     = ["${STORE}/wheels-conv1d:${CONV1D_KEY}"]
  args = {
    CONV1D_VERSION = CONV1D_VERSION
    CONV1D_SDIST   = CONV1D_SDIST
    CONV1D_ARCHS   = CONV1D_ARCHS
    CONV1D_PATCHES = CONV1D_PATCHES
  }
}

target "wheels-aiter" {
  inherits = ["_rocm"]
  target   = "wheels-aiter"
  tags     = ["${STORE}/wheels-aiter:${AITER_KEY}"]
  args = {
    AITER_VERSION    = AITER_VERSION
    AITER_GIT        = AITER_GIT
    AITER_COMMIT     = AITER_COMMIT
    AITER_SUBMODULES = AITER_SUBMODULES
    AITER_ARCHS      = AITER_ARCHS
    AITER_PATCHES    = AITER_PATCHES
  }
}

target "wheels-vllm" {
  inherits = ["_rocm"]
  target   = "wheels-vllm"
  tags     = ["${STORE}/wheels-vllm:${VLLM_KEY}"]
  args = {
    VLLM_VERSION           = VLLM_VERSION
    VLLM_SDIST             = VLLM_SDIST
    VLLM_TRITON_GIT        = VLLM_TRITON_GIT
    VLLM_TRITON_COMMIT     = VLLM_TRITON_COMMIT
    VLLM_TRITON_SUBMODULES = VLLM_TRITON_SUBMODULES
    VLLM_ARCHS             = VLLM_ARCHS
    VLLM_PATCHES           = VLLM_PATCHES
  }
}

# A wheel that the registry has is taken from there: `--set rocm.contexts.wheels-mamba=docker-image://...` by the builder.
target "rocm" {
  inherits = ["_rocm"]
  target   = "rocm"
  tags     = ["${STORE}/rocm:${ROCM_CONTENT}"]
  contexts = {
    wheels-mamba  = "target:wheels-mamba"
    wheels-conv1d = "target:wheels-conv1d"
    wheels-aiter  = "target:wheels-aiter"
    wheels-vllm   = "target:wheels-vllm"
  }
  labels = {
    "org.opencontainers.image.title"       = "hilgate rocm"
    "org.opencontainers.image.version"     = HILGATE_VERSION
    "org.opencontainers.image.revision"    = REVISION
    "org.opencontainers.image.base.name"   = ROCM_BASE_NAME
    "org.opencontainers.image.base.digest" = ROCM_BASE_DIGEST
    "hilgate.content"                      = ROCM_CONTENT
    "hilgate.pins.archs"                   = ARCHS
    "hilgate.pins.rocm"                    = ROCM
    "hilgate.pins.torch"                   = TORCH
    "hilgate.pins.triton"                  = TRITON
    "hilgate.pins.mamba-ssm"               = MAMBA_VERSION
    "hilgate.pins.causal-conv1d"           = CONV1D_VERSION
    "hilgate.pins.aiter"                   = AITER_VERSION
    "hilgate.pins.vllm"                    = VLLM_VERSION
  }
}

target "cpu" {
  dockerfile = "docker/cpu.Dockerfile"
  platforms  = ["linux/amd64"]
  secret     = ["id=pip,env=HILGATE_PIP_CONF"]
  tags       = ["${STORE}/cpu:${CPU_CONTENT}"]
  args = {
    BASE     = CPU_BASE
    PACKAGES = CPU_PACKAGES
  }
  labels = {
    "org.opencontainers.image.title"       = "hilgate cpu"
    "org.opencontainers.image.version"     = HILGATE_VERSION
    "org.opencontainers.image.revision"    = REVISION
    "org.opencontainers.image.base.name"   = CPU_BASE_NAME
    "org.opencontainers.image.base.digest" = CPU_BASE_DIGEST
    "hilgate.content"                      = CPU_CONTENT
    "hilgate.pins.suite"                   = CPU_SUITE
    "hilgate.pins.packages"                = CPU_PACKAGES
  }
}
