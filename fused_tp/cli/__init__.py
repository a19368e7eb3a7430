"""The `fused-tp` command: one module per subcommand, imported when it is asked for."""
