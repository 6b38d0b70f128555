"""Ask an engine questions through lm-eval, and score what it answers."""
