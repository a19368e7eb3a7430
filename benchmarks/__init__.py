"""What fused_tp costs next to its rivals, measured so that a noisy machine favours neither.

All contestants of a case run in turn in the same ranks, round after round, and every figure is the median over the
rounds of a ratio of two times of the same round. `python -m benchmarks.cpu` runs the CPU suite; see results/README.md.
"""
