"""Attention over a sequence that is cut over ranks: who holds and sees what, who computes, what moves."""
