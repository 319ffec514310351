"""The authors' programs and ours, side by side: what `make fidelity` compares, and what may be called "released".

Nothing of theirs is in this repository. Pinned commits are fetched, or taken from a folder of clones, and imported for
the time of a comparison. docs/fidelity.md says how to read the table.
"""
