# SPDX-License-Identifier: Apache-2.0
"""Make plan.json from declarations and a change: each step and each omission with its reason."""
