"""Storage of a store's objects: in a directory or in S3."""
