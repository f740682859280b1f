"""Values in, rich tables and one HTML page out."""
