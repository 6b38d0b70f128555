# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's prefill (SSD): outputs and states of the tokens of some sequences."""
