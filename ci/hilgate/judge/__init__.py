# SPDX-License-Identifier: Apache-2.0
"""Compare what a plan expects with what arrived: a verdict for each step and for the whole."""
