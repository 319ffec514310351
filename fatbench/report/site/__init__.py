"""Pages that open from disk: leaderboards, tables, figures and what is behind each number."""
