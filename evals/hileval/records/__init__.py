"""Records of evaluations, and the baselines made of them."""
