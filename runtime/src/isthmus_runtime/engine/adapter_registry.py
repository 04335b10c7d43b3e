"""The adapters of one engine by name: read beside its thread, made known to the scheduler, listed for clients."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from ..errors import ConfigError, InvalidRequest, UnknownModel
from ..interfaces.steps import Adapter, AdapterHolder
from ..lora_config import MEMORY_BYTES
from ..request import AdapterName
from .loop import EngineLoop

_LOG = logging.getLogger(__name__)

MOST_TOLD = 48 << 10
"""Bytes of /info that adapters may take: routers and the operator, which takes 64 KiB of it, read all of them often."""
_DIGEST_TOLD = 64
"""Of them, what an adapter takes beside its name."""


class AdapterRegistry:
    """Loads and unloads adapters, one at a time. Any thread."""

    def __init__(
        self,
        engine: EngineLoop,
        holder: AdapterHolder | None,
        *,
        taken: tuple[str, ...] = (),
        folder: str = "",
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """`holder` None: this engine has no slots for adapters. `taken`: names that no adapter may have. `folder`:
        where those must be that a client asks for; empty: clients may not. `memory_bytes`: of the host, that all of
        them may take."""
        self._engine = engine
        self._holder = holder
        self._taken = taken
        self._folder = folder
        self._memory = memory_bytes
        self._sizes: dict[str, int] = {}
        """Bytes of those that have a name, by digest."""
        self._lock = threading.Lock()
        self._names: dict[str, AdapterName] = {}

    @property
    def names(self) -> tuple[AdapterName, ...]:
        """What requests may ask for."""
        return tuple(self._names.copy().values())

    def load(self, name: str, folder: str, *, replace: bool = False) -> AdapterName:
        """Have the adapter in `folder` under `name`. An adapter that `replace`d goes when its requests have ended.

        Raises InvalidRequest for a name that is taken, and ConfigError with all that is wrong with the adapter.
        """
        if self._holder is None:
            raise InvalidRequest("lora_name: this engine has no room for adapters; start it with --max-loras")
        if not name or not name.isprintable() or name in self._taken:
            raise InvalidRequest(f"lora_name: {name!r} cannot be an adapter's name; give another", param="lora_name")
        with self._lock:
            adapter = self._holder.read(folder)
            before = self._names.get(name)
            if before is not None and before.digest == adapter.digest:
                return before
            if before is not None and not replace:
                raise InvalidRequest(
                    f"lora_name: {name!r} is loaded, with other weights; unload it first, or set load_inplace",
                    param="lora_name",
                )
            told = sum(len(json.dumps(each)) + _DIGEST_TOLD for each in {*self._names, name})
            if told > MOST_TOLD:
                raise InvalidRequest(
                    f"lora_name: {len(self._names)} adapters are loaded, and with {name!r} their names would take "
                    f"{told} bytes, of at most {MOST_TOLD}; unload others, or give shorter names",
                    param="lora_name",
                )
            self._check_memory(name, adapter)
            self._engine.add_adapter(name, adapter)
            self._names[name] = AdapterName(name, adapter.digest)
            self._sizes[adapter.digest] = adapter.nbytes
            self._retire(before)
            _LOG.info("adapter %s is loaded from %s: %s", name, folder, adapter.digest)
            return self._names[name]

    def unload(self, name: str) -> None:
        """Take no new request for it; those that run end with it. Raises UnknownModel."""
        with self._lock:
            before = self._names.pop(name, None)
            if before is None:
                raise UnknownModel(f"lora_name: no adapter {name!r} is loaded", param="lora_name")
            self._retire(before)
            _LOG.info("adapter %s is unloaded", name)

    def change(self, name: str, path: str | None, *, replace: bool = False) -> None:
        """What a client asks for: load the adapter at `path` in the folder for it; None: unload. Raises
        InvalidRequest."""
        if not self._folder:
            raise InvalidRequest("adapters cannot be changed through the API here; start the engine with --lora-dir")
        if path is None:
            self.unload(name)
            return
        found = self._inside(path)
        try:
            self.load(name, str(found), replace=replace)
        except ConfigError as e:
            # Without where on this machine it is.
            text = "; ".join(e.problems).replace(f"{found}/", "").replace(str(found), path)
            raise InvalidRequest(f"lora_path: {text}", param="lora_path") from e

    def _inside(self, path: str) -> Path:
        root = Path(self._folder).resolve()
        try:
            found = (root / path).resolve()
            if found.is_relative_to(root) and found.is_dir():
                return found
        except (OSError, ValueError):
            pass  # no path at all, such as one with a NUL
        raise InvalidRequest(f"lora_path: there is no folder {path!r} in the folder of adapters", param="lora_path")

    def _check_memory(self, name: str, adapter: Adapter) -> None:
        """Those that were replaced or unloaded count for as long as requests run that use them."""
        assert self._holder is not None
        taken = {**self._holder.kept(), **self._sizes}
        wanted = sum({**taken, adapter.digest: adapter.nbytes}.values())
        if wanted > self._memory:
            raise InvalidRequest(
                f"lora_name: {len(taken)} adapters are in memory, and with {name!r} they would take {wanted} bytes of "
                f"it, of at most {self._memory} (--lora-memory); unload others, or raise it",
                param="lora_name",
            )

    def _retire(self, before: AdapterName | None) -> None:
        if before is not None and all(other.digest != before.digest for other in self._names.values()):
            del self._sizes[before.digest]
            self._engine.retire_adapter(before.digest)
