"""Federated adversarial training, benchmarked: suites, a database, tables beside the published ones."""

__version__ = "0.1.0"
