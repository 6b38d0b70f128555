# SPDX-License-Identifier: Apache-2.0
"""Ask an engine questions through lm-eval, and score what it answers."""
