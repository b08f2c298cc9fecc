"""What was recorded and what was asked: runs as schema, tables, statistics. No torch."""
