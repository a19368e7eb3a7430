"""Transport and schedules over torch.distributed, for every group, on CPU or GPU."""
