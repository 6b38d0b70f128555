# SPDX-License-Identifier: Apache-2.0
"""Run the steps of a plan on this machine, and read what they left."""
