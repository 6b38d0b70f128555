# SPDX-License-Identifier: Apache-2.0
"""Accuracy gates: their declaration, statistics, power and judgement."""
