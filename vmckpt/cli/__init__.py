"""The command line: results go to stdout, progress and errors to stderr."""
