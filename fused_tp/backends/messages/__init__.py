"""Messages of torch.distributed: works on every group, CPU or GPU."""
