"""How fast the program is, measured against what people run: `make bench`, or `python -m benchmarks`."""
