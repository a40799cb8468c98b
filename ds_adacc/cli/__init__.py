"""The command `ds_adacc`: main.py, and a file for each subcommand."""
