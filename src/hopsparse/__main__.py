"""`python -m hopsparse` is the command line."""

from .cli import main

main()
