"""Figures: curves, bars, matrices and images, drawn with matplotlib: files, or inside a page."""
