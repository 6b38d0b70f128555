# SPDX-License-Identifier: Apache-2.0
"""Serve families of hybrid models in vLLM under everything a scheduler does; judge each answer by transformers."""
