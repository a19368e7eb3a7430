"""A group's own NCCL communicator."""
