"""The command line: what people type, and what a terminal shows.

    app          every command and its place
    streams      stdin, stdout and stderr as every command finds them
    options      arguments and options that commands share
    common       what commands share: reading suites, finding cells, printing JSON
    helping      help pages, and suggestions for mistyped commands
    completing   shell completion
    show         prints tables and facts for people
    watch        live progress on stderr
    running      `fatbench run`
    suites       `fatbench suite`, `plan`
    budget       `fatbench plan` without a suite: what fits into a time
    reporting    `fatbench status`, `report`, `plot`
    shipped      results that come with the program
    compare      `fatbench compare`
    cells        `fatbench show`, `logs`
    outcomes     `fatbench outcomes`
    models       `fatbench models`
    evaluating   `fatbench evaluate`
    inverting    `fatbench invert`
    audit        `fatbench audit`
    verify       `fatbench verify`
    submit       `fatbench submit`
    publish      `fatbench import --as-published`
    site         `fatbench site`
    cite         `fatbench cite`
    new          `fatbench new`
    beside       `fatbench new --beside`
    data         `fatbench data`
    db           `fatbench db`, `export`, `import`
    cleanup      `fatbench delete`, `clean`

Arguments are parsed here and nowhere else, and what the other folders return becomes text here. Nothing here computes a
number.
"""
