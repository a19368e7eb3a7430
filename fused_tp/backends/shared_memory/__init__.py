"""CPU shared memory between ranks of one host."""
