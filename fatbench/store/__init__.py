"""What is kept: cells, the stages of their work, every number and what produced it. Never imports torch.

| module | what |
|---|---|
| database | an address is opened, its schema made, upgraded and checked; transactions, and what goes wrong in them |
| schema, migrations | the tables and the public view |
| stages | `Store`: what is read from a database and written to it, one transaction a step |
| processes, rows | which process is alive; values as the tables hold them |
| lines | JSON lines between machines |
| selection | which round's model is evaluated |

Not here: what a cell means. A spec is a mapping and a number has five fields; the store knows no suite and no engine.
"""
