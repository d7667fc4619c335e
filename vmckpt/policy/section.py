"""The base class of all sections of a policy file, and types of their values."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=0, le=100_000)]


class Section(BaseModel):
    """A section of a policy file. It accepts only known keys, with values of the right type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
