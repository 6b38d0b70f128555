# SPDX-License-Identifier: Apache-2.0
"""MLA decode over padded latent pages, with work and reduce tables made on the device."""
