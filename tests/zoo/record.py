"""Look at every family and write results.json and the table of docs/models.md.

python tests/zoo/record.py            # all families, a few minutes
python tests/zoo/record.py bert opt   # some of them
python tests/zoo/record.py --table    # the table from what is recorded
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE, DOCS = HERE / "results.json", HERE.parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families: python tests/zoo/record.py -->\n", "<!-- end -->"
WAYS = {"static": "static cache", "dynamic": "transformers' cache"}


def kept() -> dict[str, dict[str, Any]]:
    """What was found, by family."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def look(name: str) -> dict[str, Any]:
    """A family with LoRA and with all weights, the larger of each figure."""
    from compare import looked_at

    both = []
    for full in (False, True):
        with tempfile.TemporaryDirectory() as place:
            both.append(looked_at(name, Path(place), full=full))
    lora, whole = both
    assert lora.way == whole.way, f"{name}: {lora.why or lora.way}, {whole.why or whole.way}"
    worst = {k: float(f"{max(v, whole.figures[k]):.1e}") for k, v in lora.figures.items()}
    assert not lora.wrong() | whole.wrong(), f"{name}: {worst}"
    return {"way": lora.way, "figures": worst, "why": lora.why}


def table(found: dict[str, dict[str, Any]]) -> str:
    """The families that are right, with their largest differences, and those that are refused, with the reason."""
    lines = ["| family | decoded by | log-prob | KL | gradient |", "| --- | --- | --- | --- | --- |"]
    for name, one in sorted(found.items()):
        if one["way"] != "refused":
            figures = one["figures"]
            logp = max(figures[k] for k in ("sampler", "log-prob", "reference"))
            shown = " | ".join(f"{x:.0e}" for x in (logp, figures["KL"], figures["gradient"]))
            lines.append(f"| {name} | {WAYS[one['way']]} | {shown} |")
    lines += ["", "| refused | in these words |", "| --- | --- |"]
    lines += [f"| {name} | {one['why']} |" for name, one in sorted(found.items()) if one["way"] == "refused"]
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from families import FAMILIES

    warnings.simplefilter("ignore")
    found = kept() if FILE.is_file() else {}
    if names != ["--table"]:
        for name in names or FAMILIES:
            try:
                found[name] = look(name)
            except Exception as error:  # the others are looked at all the same
                print(name, "FAILED", type(error).__name__, error, flush=True)
                continue
            print(name, found[name], flush=True)
            ordered = {k: found[k] for k in sorted(found) if k in FAMILIES}
            FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCS.write_text(before + BEGIN + table({k: v for k, v in found.items() if k in FAMILIES}) + END + after)


if __name__ == "__main__":
    main(sys.argv[1:])
