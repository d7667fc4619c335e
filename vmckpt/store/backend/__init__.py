"""Where a store's objects are: a directory or S3."""
