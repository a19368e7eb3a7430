"""How bytes get from rank to rank: torch.distributed everywhere, shared memory between ranks of one host."""
