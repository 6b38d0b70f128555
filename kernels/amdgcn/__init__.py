# SPDX-License-Identifier: Apache-2.0
"""Read, check and execute the AMD machine code of Triton kernels on a CPU; `amdgcn.launch.amdgcn` is the way in."""
