"""The end of a migration by epochs: the planned switchover."""
