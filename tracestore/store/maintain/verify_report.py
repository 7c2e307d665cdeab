"""The result of verifying a store."""

from dataclasses import dataclass, field


@dataclass
class VerifyReport:
    """What verify found. `damaged` maps a path in the store to what is wrong with it."""

    generation: int | None = None
    num_files: int = 0
    num_bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
