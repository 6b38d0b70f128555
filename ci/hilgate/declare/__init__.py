# SPDX-License-Identifier: Apache-2.0
"""Read and check declarations: areas, agents, quarantine, protected files, and what imports what."""
