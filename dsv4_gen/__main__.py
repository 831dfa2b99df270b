"""`python -m dsv4_gen`, see `cli.py`."""

from .cli import main

main()
