# SPDX-License-Identifier: Apache-2.0
"""What runs on an agent's host, around its containers.

It needs Python 3.10 or later with PyYAML, and of hilgate `names` and `errors` alone.
"""
