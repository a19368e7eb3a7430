"""Attention over a sequence that is cut over ranks: who holds what, who sees what, who computes a step, how it moves."""
