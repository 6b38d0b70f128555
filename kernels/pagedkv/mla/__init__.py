"""MLA decode over padded latent pages, with work and reduce tables made on the device."""
