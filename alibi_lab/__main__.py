"""`python -m alibi_lab` is the command `alibi`."""

from alibi_lab.cli.main import main

if __name__ == "__main__":
    main()
