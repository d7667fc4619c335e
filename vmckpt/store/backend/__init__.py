"""Where a store keeps its objects: a folder or S3."""
