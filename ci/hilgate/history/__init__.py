"""What builds leave for later ones: append-only files, the questions asked of them, and a page of plots."""
