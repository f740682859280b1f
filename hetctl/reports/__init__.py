"""Reports: rich tables for the terminal, and self-contained HTML pages."""
