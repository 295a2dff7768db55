"""Scripts that measure. Not a package to install: run them from a checkout."""
