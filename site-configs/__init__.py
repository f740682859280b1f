"""Site files, as a package so that an editable install finds them too."""
