"""The command line: what people type, and what a terminal shows.

    app          every command and its place, and the options of the program
    helping      help pages, options on both sides of a command, words that are answered with ours
    options      arguments and options that commands share
    shared       what commands share: reading suites, finding cells, printing JSON
    completing   shell completion
    streams      stdin, stdout and stderr as every command finds them
    show         prints tables and facts for people
    watch        live progress on stderr
    planning     `fatbench plan`
    run          `fatbench run`
    reporting    `fatbench status`, `report`, `plot`
    listing      `fatbench list`, `fetch`
    showing      `fatbench show`, `doctor`
    site         `fatbench site`
    compare      `fatbench compare`
    verify       `fatbench verify`
    audit        `fatbench audit`
    new          `fatbench new`
    shipped      results that come with the program, for `new --beside`
    checking     `fatbench check`
    evaluate     `fatbench evaluate`
    inverting    `fatbench invert`
    exchange     `fatbench export`, `import`
    delete       `fatbench delete`

Arguments are parsed here and nowhere else, and what the other folders return becomes text here. Nothing here computes a
number.
"""
