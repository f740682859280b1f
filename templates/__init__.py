"""Templates of batch scripts, as a package so that an editable install finds them too."""
