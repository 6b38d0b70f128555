"""The evidence of a build as one file: written, and verified."""
