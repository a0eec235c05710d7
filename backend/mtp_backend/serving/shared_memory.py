"""Shared memory of one server: a record of its regions, so that what a crash leaves can be removed."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
# The server names the region of each model's process so; for backends of their own it takes no other beginning.
REGION = re.compile(r"triton_mtp_backend_shm_region_[0-9a-f-]{36}")


class Regions:
    """The regions of the server that this process supervises.

    Their names are in a file beside them, which is locked as long as this process lives. A record that nobody holds is
    that of a process that was killed: its regions are removed when the next one starts.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        user = f"mtp-{os.getuid()}-"
        for record in folder.glob(f"{user}*.regions"):
            _remove_abandoned(record)
        self._names: set[str] = set()
        self._record = folder / f"{user}{secrets.token_hex(6)}.regions"
        # It gets its name when it is held: nobody may find it without.
        new = self._record.with_suffix(".new")
        self._held = open(new, "a")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        new.rename(self._record)

    def note(self, server: int) -> None:
        """Records the regions that a server has mapped."""
        with suppress(OSError):
            mapped = set(REGION.findall(Path(f"/proc/{server}/maps").read_text()))
            for name in sorted(mapped - self._names):
                self._held.write(f"{name}\n")
            self._held.flush()
            self._names |= mapped

    def clear(self) -> int:
        """Removes the recorded regions, which no process may use any more. Returns how many there were."""
        removed = _remove(self._folder, self._names)
        self._names.clear()
        self._held.truncate(0)
        return removed

    def close(self) -> None:
        """Removes the regions and the record."""
        self.clear()
        self._record.unlink(missing_ok=True)
        self._held.close()


def _remove_abandoned(record: Path) -> None:
    with suppress(OSError), open(record) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Anybody can make a file here: believe our own alone, and nothing but names of regions in it.
        if os.fstat(file.fileno()).st_uid == os.getuid():
            _remove(record.parent, {line for line in file.read().splitlines() if REGION.fullmatch(line)})
            record.unlink()


def _remove(folder: Path, names: set[str]) -> int:
    removed = 0
    for name in names:
        with suppress(FileNotFoundError):
            (folder / name).unlink()
            removed += 1
    return removed
