"""The command line: results on stdout, progress and errors on stderr."""
