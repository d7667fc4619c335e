"""Views of one thing, and dialogs."""
