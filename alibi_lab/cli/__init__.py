"""The command line of the laboratory: `main.py` has the whole command `alibi`, with the commands of the library."""
