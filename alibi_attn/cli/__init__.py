"""The command `alibi`: `main.py` lists the commands, which are in the other files; `console.py` has their output and errors."""
