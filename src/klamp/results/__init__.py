"""What runs left on disk, as records, figures, tables and a verdict."""
