"""Bridges to libraries that people already use; each module imports its library when it is used, not before."""
