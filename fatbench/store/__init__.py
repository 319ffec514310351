"""What was measured, and with what: a database of cells, stages, runs and numbers, and files of JSON lines.

    schema                the tables and the public views       database     open, upgrade, lock: SQLite or PostgreSQL
    stages                what is claimed, committed, read      lines        export and import
    selection             which rounds count as last, best-val and best-test

Every write is one transaction. Not here: files of weights, anything that trains, anything that prints. Never torch.
"""
