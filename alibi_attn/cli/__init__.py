"""The command `alibi`: `main.py` and one module a family of commands; `console.py` is how all of them speak."""
