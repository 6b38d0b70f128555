"""hileval: accuracy gates for hybrid models (statistics, lm-eval harness, baselines and a pocket model)."""
