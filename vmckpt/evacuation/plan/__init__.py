"""Where each guest goes, and what the run will be like."""
