# SPDX-License-Identifier: Apache-2.0
"""The evidence of a build as one file: written, and verified."""
