"""A table as Markdown, LaTeX, HTML, CSV, JSON or text for a terminal."""
