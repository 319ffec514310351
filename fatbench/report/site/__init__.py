"""Pages that open from disk: leaderboards, tables, figures and the runs of each number."""
