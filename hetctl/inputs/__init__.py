"""What a person writes: read, checked and, if any of it is wrong, refused whole."""
