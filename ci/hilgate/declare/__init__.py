"""Read and check declarations: areas, agents, quarantine, protected files, and what imports what."""
