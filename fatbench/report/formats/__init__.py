"""A table as Markdown, LaTeX, HTML, CSV, JSON or text for a terminal.

markdown      GitHub's Markdown
latex         LaTeX floats in booktabs style
latex_text    escapes text for LaTeX
html          HTML tables and the frame of every page
terminal      colours for a terminal
records       CSV and JSON
"""
