# SPDX-License-Identifier: Apache-2.0
"""What runs on an agent's host, around its containers: the standard library and `hilgate.errors`, Python >= 3.10."""
