from fatbench.cli import main

main()
