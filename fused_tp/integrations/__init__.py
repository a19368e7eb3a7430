"""Adapters for third-party libraries. Each module imports its library on first use, not at import time."""
