"""Memory that the kernels of all ranks read and write, and the workspaces in it."""
