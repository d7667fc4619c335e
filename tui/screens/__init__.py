"""Detail screens and dialogs."""
