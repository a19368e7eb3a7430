"""How an op runs: which bytes move when, and what is computed meanwhile. Knows nothing of autograd."""
