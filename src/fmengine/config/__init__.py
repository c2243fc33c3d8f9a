"""The training config: schema, reading with file positions, checks."""
