"""`python -m alibi_attn` is the command `alibi`."""

from alibi_attn.cli.main import main

if __name__ == "__main__":
    main()
