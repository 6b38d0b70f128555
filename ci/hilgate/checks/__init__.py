# SPDX-License-Identifier: Apache-2.0
"""The steps of the gate that are hilgate's own: hygiene, the bug zoo, the replay of changes, recorded reads."""
