"""The result of verifying a store."""

from dataclasses import dataclass, field


@dataclass
class VerifyReport:
    """The result of `verify`.

    `damaged` maps the path of a file in the store to a description of its damage. `leftovers` lists the files that
    no generation names: those of interrupted or running writers.
    """

    generation: int | None = None
    num_files: int = 0
    num_bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
