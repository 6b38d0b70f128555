# SPDX-License-Identifier: Apache-2.0
"""What was expected against what arrived: a verdict for each step and for the whole."""
