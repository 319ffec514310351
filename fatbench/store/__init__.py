"""The database of cells, stages, runs and numbers, and its exchange as JSON lines.

    database        opens, upgrades and locks a database: SQLite or PostgreSQL
    opening         opens one for reading, without creating it
    schema          its tables and SQL views
    stages          cells and their stages: claim, commit, read
    leases          how long a run holds a stage
    pools           the queue of a run: its cells, workers and their reports
    liveness        whether the process that runs a stage is still alive
    stage_names     the parts of a stage's name: attack, hash, precision, round
    grid_points     the points of suites' grids at which a cell stands, for SQL
    numbers         how numbers are stored: one row for each round and metric
    rows            the values of a row as the tables hold them
    doubt_names     the metrics that make a result doubtful: "doubt_..."
    selection       which round is the last, best-val or best-test one
    timing          how long stages took, for estimates
    fingerprints    a network's fingerprint, as stored
    inputs          which data, weights and plug-ins produced a number
    replicates      further runs of the same cell
    document        a cell as a document: the fields of a line, its numbers, its digests
    problems        what cannot be in a document
    merge           one document of two of the same cell
    cell_records    reads and writes documents in the database
    jsonl           exports results and imports them
    tar             half-done cells as a tar
    old_files       names that files of earlier versions have
    old_databases   databases of earlier schemas
    integrity       checks a whole database
    rights          what this user may write and remove
    cleanup         deletes cells and copies databases
    folder          the folder of a database's checkpoints and logs

Every write is one transaction. Nothing here trains, prints or imports torch.
"""
