"""Where each key of a config was given, so that an error can point at it."""

from dataclasses import dataclass, field

KeyPath = tuple[str | int, ...]
"""Where a value stands: keys of mappings and indices of lists, from the top."""


@dataclass(frozen=True)
class Problem:
    """One mistake: the key it is about, what is wrong in plain words, and the line where that is not the key's own."""

    key: KeyPath
    text: str
    line: int | None = None


def problem(key: str, text: str) -> Problem:
    """A problem of a dotted key."""
    return Problem(tuple(key.split(".")), text)


def dotted(key: KeyPath) -> str:
    """The key as one writes it: `optimizer.betas.0`."""
    return ".".join(map(str, key))


@dataclass
class Source:
    """A config file's name, the lines of its keys, and the `--set` arguments laid over them."""

    name: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    sets: dict[KeyPath, str] = field(default_factory=dict)

    def lay_over(self, key: KeyPath, argument: str) -> None:
        """From now on `key` and all below it come from `--set argument`."""
        for places in (self.lines, self.sets):
            for other in [other for other in places if other[: len(key)] == key]:
                del places[other]
        self.sets[key] = argument

    def line(self, found: Problem) -> str:
        """`train.yaml:12: optimizer.lrr: text`; the line is the key's or, where it is not given, its section's."""
        text = f"{dotted(found.key)}: {found.text}" if found.key else found.text
        place = found.line or self._place(found.key)
        if isinstance(place, str):
            return f"--set {place}: {text}"
        return f"{self.name}:{place}: {text}" if place else f"{self.name}: {text}"

    def order(self, found: Problem) -> tuple[int, int]:
        """Sort key of a problem: those of the whole file, then by line, then the `--set` ones."""
        place = found.line or self._place(found.key)
        if isinstance(place, str):
            return 1, list(self.sets.values()).index(place)
        return 0, place or 0

    def _place(self, key: KeyPath) -> int | str | None:
        """Line or `--set` argument of the nearest given key at or above `key`."""
        for end in range(len(key), 0, -1):
            place = self.sets.get(key[:end]) or self.lines.get(key[:end])
            if place:
                return place
        return None
