"""What each subcommand of the command line does, one file a command."""
