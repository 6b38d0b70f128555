# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's chunked scan (SSD): the step that makes its outputs."""
