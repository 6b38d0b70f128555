"""Accuracy gates: their declaration, statistics, power and judgement."""
