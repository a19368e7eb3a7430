"""Groups of several hosts: fast links inside each host, messages between hosts."""
