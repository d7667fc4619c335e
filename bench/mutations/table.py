"""The complete table of mutations."""

from bench.mutations.mutation import Mutation
from bench.mutations.table_epochs import EPOCHS
from bench.mutations.table_hosts import HOSTS
from bench.mutations.table_lease import LEASE
from bench.mutations.table_operators import OPERATORS
from bench.mutations.table_store import STORE

TABLE: tuple[Mutation, ...] = (*LEASE, *EPOCHS, *HOSTS, *OPERATORS, *STORE)
