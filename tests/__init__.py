import os

# pytest's workers set it, and then tables in pipes would be that narrow.
os.environ.pop("COLUMNS", None)
