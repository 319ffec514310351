"""Measurements read from the database, with their tests, flags, provenance and published values."""
