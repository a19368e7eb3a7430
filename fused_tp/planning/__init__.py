"""How a model is spread over ranks: written down, checked, built, and predicted."""
