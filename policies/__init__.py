"""The policies that ship, as data of the package."""
