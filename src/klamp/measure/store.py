"""A measurement on disk: its settings, and the records of each block, so that it goes on where it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from klamp import jsonl
from klamp.errors import ConfigError, writing
from klamp.train.run_folder import atomic_text, no_links_out, read_jsonl

GO_ON = "run the same command again to go on where it stopped"


@dataclass(frozen=True)
class Settings:
    """What makes a measurement the same measurement."""

    policy: str
    reference: str
    prompts: int
    max_tokens: int
    samples: int
    temperature: float
    batch: int
    seed: int
    chat: bool | None
    given: bool
    prompts_hash: str = ""


class Store:
    """Records on disk, block by block, or in memory when there is no folder."""

    def __init__(self, folder: Path | None, settings: Settings, rank: int) -> None:
        self.folder, self.memory = folder, []  # type: ignore[var-annotated]
        self.done: set[int] = set()
        if folder is None:
            return
        no_links_out(folder)
        with writing(folder, GO_ON):
            folder.mkdir(parents=True, exist_ok=True)
        self._claim(folder, settings)
        self.file = folder / f"parts-{rank}.jsonl"
        for line in self._lines():
            self.done.add(_block(line, folder))

    def add(self, block: int, found: list[dict[str, Any]]) -> None:
        """Keep the records of a block; on disk before this returns."""
        if self.folder is None:
            self.memory.append({"block": block, "records": found})
            return
        with writing(self.file, GO_ON), self.file.open("ab") as handle:
            handle.write((json.dumps({"block": block, "records": found}, ensure_ascii=False) + "\n").encode())
            handle.flush()
            os.fsync(handle.fileno())

    def everything(self, blocks: int, ranks: int) -> Iterator[dict[str, Any]]:
        """All records in the order of their blocks, once every process has written its own."""
        if self.folder is None:
            if ranks > 1:
                raise ConfigError("several processes share a measurement through a folder. Give out= (or --out).")
            lines: list[dict[str, Any]] = self.memory
            yield from (r for line in lines for r in line["records"])
            return
        index = self._wait(blocks)
        for _, (file, offset) in sorted(index.items()):
            with file.open("rb") as handle:
                handle.seek(offset)
                line = jsonl.parse(handle.readline().decode("utf-8", "replace"), f"{str(file)!r}, byte {offset}")
            found = line.get("records")
            if not isinstance(found, list) or not all(isinstance(r, dict) for r in found):
                raise ConfigError(
                    f"{str(file)!r}, byte {offset}: no records of klamp's. Remove the file to measure again."
                )
            yield from found

    def _wait(self, blocks: int, patience: float = 3600.0) -> dict[int, tuple[Path, int]]:
        """Where each block lies; waits for the other processes."""
        import time

        begun = time.monotonic()
        while len(index := self._index()) < blocks:
            if time.monotonic() - begun > patience:
                raise ConfigError(f"only {len(index)} of {blocks} blocks arrived in {self.folder}. Run it again.")
            time.sleep(0.5)
        return index

    def _index(self) -> dict[int, tuple[Path, int]]:
        index: dict[int, tuple[Path, int]] = {}
        assert self.folder is not None
        for file in sorted(self.folder.glob("parts-*.jsonl")):
            offset = 0
            with file.open("rb") as handle:
                for raw in handle:
                    if raw.endswith(b"\n"):
                        line = jsonl.parse(raw.decode("utf-8", "replace"), f"{str(file)!r}, byte {offset}")
                        index.setdefault(_block(line, file), (file, offset))
                    offset += len(raw)
        return index

    def _lines(self) -> Iterator[dict[str, Any]]:
        """This process's whole lines; a torn last one is cut off. Blocks of other processes count as done too."""
        assert self.folder is not None
        for file in sorted(self.folder.glob("parts-*.jsonl")):
            if file == self.file:
                with file.open("rb+") as handle:
                    handle.truncate(sum(len(raw) for raw in handle.readlines() if raw.endswith(b"\n")))
            yield from read_jsonl(file)

    def _claim(self, folder: Path, settings: Settings) -> None:
        file = folder / "settings.json"
        wanted = asdict(settings)
        if file.is_file():
            try:
                saved = jsonl.parse(file.read_text(encoding="utf-8"), str(file))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{str(file)!r} cannot be read: {error}. Choose another --out.") from None
            different = sorted(k for k in wanted if saved.get(k) != wanted[k])
            if different:
                raise ConfigError(
                    f"{str(folder)!r} holds another measurement; {', '.join(different)} differ. Choose another --out."
                )
            return
        atomic_text(file, json.dumps(wanted, indent=1, ensure_ascii=False))


def _block(line: dict[str, Any], file: Path) -> int:
    block = line.get("block")
    if isinstance(block, bool) or not isinstance(block, int):
        raise ConfigError(f"{str(file)!r}: block must be a whole number, got {block!r:.80}. Choose another --out.")
    return block
