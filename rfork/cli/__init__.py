"""The `rfork` command: one module a subcommand."""
