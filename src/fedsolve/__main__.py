from fedsolve.cli import main

main()
