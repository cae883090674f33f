"""Write docs/models.md: ``python -m tests.zoo > docs/models.md`` (a quarter of an hour)."""

from __future__ import annotations

from tests.zoo.families import families
from tests.zoo.running import meet
from tests.zoo.table import table

if __name__ == "__main__":
    print(table({name: meet(name) for name in families()}), end="")
