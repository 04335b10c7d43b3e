"""What all records on the wire have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """A record that is refused where it has a field that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)
