# SPDX-License-Identifier: Apache-2.0
"""hilgate decides whether a change to the ROCm attention kernels may merge: declare, plan, run, judge, report."""

__version__ = "0.1.0"
