"""Transports between ranks: torch.distributed everywhere, shared memory between ranks of one host."""
