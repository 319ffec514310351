"""The command line: what people type, what is printed, what is live on a terminal.

Arguments are parsed here and nowhere else, and what the other folders return becomes text here. `app` names every
command; `suites`, `running`, `reporting`, `cells`, `data` and `db` hold the functions behind them. `options` holds the
options that they share, `common` what they do first or last, `show` and `watch` what a person sees. A command says what
was asked, calls `fatbench.run` or `fatbench.report`, and prints. Not here: anything that computes a number.
"""
