"""Linear recurrences with decay or erasure."""
