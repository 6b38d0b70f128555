# SPDX-License-Identifier: Apache-2.0
"""hileval: accuracy gates for hybrid models (statistics, lm-eval harness, baselines and a pocket model)."""

__version__ = "0.1.0"
