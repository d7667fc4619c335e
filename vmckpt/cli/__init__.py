"""The command line: stdout is for results, stderr for progress and complaints."""
