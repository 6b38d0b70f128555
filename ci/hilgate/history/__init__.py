# SPDX-License-Identifier: Apache-2.0
"""The history: a folder of judged builds, and what is asked of it."""
