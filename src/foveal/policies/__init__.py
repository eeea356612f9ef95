"""One file per KV-cache policy; the registry finds them by file name."""
