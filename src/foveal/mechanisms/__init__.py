"""One file per mechanism; the registry finds them by file name."""
