"""Figures: curves, bars, matrices and images, drawn with matplotlib or as Vega-Lite."""
