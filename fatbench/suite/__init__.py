"""A suite file becomes checked cells and what they will cost. Nothing here imports torch, numpy or a method.

    folders            the folders in which suites are searched for
    files              finds a suite, reads it and applies `extends`
    trees              plain dicts and lists from YAML: reading, merging, the line of a key
    language           from a suite to its cells: grid, overrides, weights of other cells, transfers
    contents           the structure of a suite file
    model              the pydantic models of its sections
    seeds              seeds as text: "0-4", as options and files take them and tables say them
    tables             the pydantic models of its tables and figures
    contrasts          the comparisons that a suite declares
    file_schema        the JSON Schema of suite files, for editors
    cells              a checked cell: its settings, identity and evaluations
    filters            selects cells: "model=nin and not aggregator=sfat"
    perturbation       norm and radius for attacks that state none
    standard_attacks   the field's attacks by name, for `--attack`
    threats            threat models by their letters
    signatures         the tables of functions and the settings of each
    types              the types that a setting may have
    calls              checks a call in a suite file and builds its function
    format_call        a call as text: `pgd(eps=8/255, steps=20)`
    entry              what a table states about a function: refusals, costs
    facts              what is known of a cell before it runs; refusals
    foreign            functions from other packages: which package, whether it is installed
    confounders        settings in which compared rows differ without saying so
    cost               what a run costs: passes, steps, bytes
    duration           how long a run takes
    schedule           how long it takes on many GPUs
    memory_need        how much memory a cell takes
    first_images       how many images a cell reads of its data sets
    sizes              how many cells each preset has
    asked              what a stored stage was asked to do
    sources            reads Python files without running them
    plugins            plug-ins: where they are named, which version a cell uses
    plugin_reads       what plug-ins read beside their own code
    reached            the digest of a plug-in's function
    registered         functions of a running program as plug-ins
    weights            published weights
    external_models    models that were trained elsewhere, as cells
    papers             the papers behind the suites
    publish            a paper's table as the published numbers of a suite
    validate_import    checks the settings of imported cells

Functions of other folders import `fatbench.suite.types`, so this file imports nothing. A rule about one method does not
belong here: it stands beside the method, in its `Entry`.
"""
