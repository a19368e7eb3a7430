"""Benchmarks of fused_tp against other implementations, robust to noise on the machine.

All contestants of a case run in turn in the same ranks, round after round, and every figure is the median over the
rounds of a ratio of two times of the same round. `python -m benchmarks.cpu` runs the CPU suite; see results/README.md.
"""
