# SPDX-License-Identifier: Apache-2.0
"""Images by content: the pins they are made of, the key of what they are built from, and their building."""
