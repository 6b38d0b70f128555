# SPDX-License-Identifier: Apache-2.0
"""Audit of the code objects that the AMD compiler makes, without a GPU: `python -m pagedkv.audit`."""
