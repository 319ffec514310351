"""A suite file becomes checked cells and what they will cost. Nothing here imports torch, numpy or a method.

    folders              the folders in which suites are searched for, and the papers behind suites
    files                finds a suite, reads it and applies `extends`; the number of cells in each preset
    trees                plain dicts and lists from YAML: reading, merging, the line of a key
    language             from a suite to its cells: grid, overrides, weights of other cells, transfers
    model                the pydantic models of its sections; norm and radius for attacks that state none
    tuning               the trials of a suite's rows, and what they choose
    tables               the pydantic models of its tables and figures
    declared_contrasts   the comparisons that a suite declares
    file_schema          the JSON Schema of suite files, for editors
    cells                a checked cell: its settings, identity and evaluations
    filters              selects cells: "model=nin and not aggregator=sfat"
    standard_attacks     the field's attacks by name, for `--attack`
    threats              threat models by their letters
    signatures           the tables of functions and the settings of each
    types                the types that a setting may have; seeds as text: "0-4"
    calls                checks a call in a suite file and builds its function; which package it needs
    format_call          a call as text: `pgd(eps=8/255, steps=20)`
    entry                what a table states about a function: refusals, costs
    facts                what is known of a cell before it runs, such as the images that it reads; refusals
    confounders          settings in which compared rows differ without saying so
    cost                 what a run costs: passes, steps, bytes, memory
    duration             how long a run takes, also on many GPUs
    asked                what a stored stage was asked to do; checks the settings of imported cells
    source_files         reads Python files without running them
    plugins              plug-ins: where they are named, which version a cell uses
    plugin_reads         what plug-ins read beside their own code
    reach                the digest of a plug-in's function
    registered           functions of a running program as plug-ins
    weights              published weights
    external_models      models that were trained elsewhere, as cells
    publish              a paper's table as the published numbers of a suite

Functions of other folders import `fatbench.suite.types`, so this file imports nothing. A rule about one method does not
belong here: it stands beside the method, in its `Entry`.
"""
