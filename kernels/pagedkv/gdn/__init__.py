# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (Qwen3-Next, Qwen3.5): outputs and states of the tokens of some sequences."""
