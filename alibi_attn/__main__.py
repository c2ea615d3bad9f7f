"""`python -m alibi_attn` is the library's part of the command `alibi`."""

from alibi_attn.cli.main import main

if __name__ == "__main__":
    main()
