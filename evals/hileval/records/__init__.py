# SPDX-License-Identifier: Apache-2.0
"""Records of evaluations, and the baselines made of them."""
