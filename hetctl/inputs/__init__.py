"""Files that people write: read, checked and, if any of it is wrong, refused whole."""
