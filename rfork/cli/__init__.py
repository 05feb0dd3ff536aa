"""The `rfork` command: one module per subcommand."""
