from fedsolve.cli.main import main

main()
