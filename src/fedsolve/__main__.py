"""Run the command line: `python -m fedsolve`."""

from fedsolve.cli.main import main

main()
