"""The command line, one file a command. Nothing imports it, and it imports torch only when a command runs."""
