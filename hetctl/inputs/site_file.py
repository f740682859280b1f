"""Site files, and the choice between several files of one name."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.inputs.input_errors import shown, suggestion
from hetctl.inputs.quantities import format_duration
from hetctl.inputs.validation import NAME_RULE, SAFE_NAME, model_of, validate, value_of
from hetctl.inputs.yaml_source import Location, YamlSource, read_yaml
from hetctl.model.errors import BadInputError
from hetctl.model.file_keys import Key, Pattern
from hetctl.model.site import BREAKS, HEARTBEAT_EVERY_S, NodeLinks, Site, SiteKey, Timeouts
from hetctl.model.values import dataclass

FOLDER = "site-configs"
LEAST_SILENCE_S = 5 * HEARTBEAT_EVERY_S
"""Least value of `silence_s`: heartbeats may be late, and some may be lost."""
WITHOUT_HEARTBEATS = ("meeting", "samples", "lockstep")
"""Time limits of waits during which ranks send no heartbeat."""


def trace_site(name: str, *, project: Path | None, home: Path | None) -> tuple[Site, tuple[SiteKey, ...]]:
    """Read a site as `find_site` does; return also the place of each of its keys.

    Raises
    ------
    BadInputError
        Same as for `find_site`.
    """
    search = _SiteSearch(project, home)
    path = search.locate(name, Path(), ())
    source = search.load(path, ())
    site, values = _checked(path, source)
    return site, tuple(_key(key, value, source) for key, value in values.items())


def _key(key: str, value: Any, source: YamlSource) -> SiteKey:
    """Return a key with its value as in its file, or with its default, in human units."""
    if key not in source.values:
        return SiteKey(key, value)
    place = source.place((key,))
    return SiteKey(key, source.values[key], str(place.path), place.line)


@dataclass(frozen=True)
class SiteFile(Site):
    """Machine: its batch system, nodes and queues, and the launcher of its jobs."""

    batch_system: Annotated[str, Key("Batch system that runs the jobs.", choices=tuple(BATCH_SYSTEMS))]
    launcher: Annotated[str, Key("Program that starts the steps of a job.", choices=tuple(LAUNCHERS))]
    extends: Annotated[
        Annotated[str, Pattern(rf"[^{BREAKS}]+", "must be a site's name or file")] | None,
        Key("Another site, by name or file, whose keys are used where this file has none.", min_length=1),
    ] = None


def _checked(path: Path, source: YamlSource) -> tuple[Site, Mapping[str, Any]]:
    name = path.name.removesuffix(".yaml")
    if SAFE_NAME.fullmatch(name) is None:
        raise BadInputError(f"{path}: the file's name is the site's, which {NAME_RULE}")
    model = validate(model_of(SiteFile), source)
    site = value_of(Site, model, name=name)
    if problems := list(_problems(site)):
        raise source.refusal(problems)
    return site, model.model_dump(by_alias=True)


def _problems(site: Site) -> Iterator[tuple[Location, str]]:
    names = {queue.name for queue in site.queues}
    for name in site.wanted_queues:
        if name not in names:
            yield ("queue",), f"must be one of the queues, got '{name}'{suggestion(name, names)}"
    most: dict[str, float] = {}
    for queue in site.queues:
        # Several entries of one name are bins by number of nodes, as on Summit.
        nodes = queue.max_nodes or math.inf
        if nodes <= most.get(queue.name, 0):
            yield ("queues",), f"entries of queue '{queue.name}' must have rising max_nodes"
        most[queue.name] = nodes
        if (queue.min_nodes or 1) > nodes:
            yield ("queues",), f"min_nodes of queue '{queue.name}' must be at most its max_nodes"
    of_types = sum(node_type.nodes for node_type in site.node_types)
    if site.node_types and of_types != site.nodes:
        yield ("node_types",), f"must add up to nodes ({site.nodes}), got {of_types}"
    if site.gpu_cores and len(site.gpu_cores) != site.gpus_per_node:
        yield ("gpu_cores",), f"must have an entry for each of the {site.gpus_per_node} GPUs of a node"
    if site.stage and site.container:
        yield ("stage",), "must not be beside `container`, whose image has the environment"
    yield from links_problems(site.links) if site.links else ()
    yield from _timeouts_problems(site.timeouts)


def links_problems(links: NodeLinks) -> Iterator[tuple[Location, str]]:
    """Yield the values of links that are given twice or not at all."""
    intra, inter = links.intra_node, links.inter_node
    line = [value for value in (inter.latency_s, inter.bytes_per_s) if value is not None]
    if (intra.scaling is None) == (not intra.points):
        yield ("links", "intra_node"), "must have either scaling or points"
    if bool(line) == bool(inter.points) or (line and len(line) < 2):
        yield ("links", "inter_node"), "must have either latency_s and bytes_per_s, or points"
    sizes = {size for size, _ in inter.points}
    if len(sizes) == 1:
        rule = f"must be of at least two sizes, got only {shown(sizes.pop())} bytes"
        yield ("links", "inter_node", "points"), rule


def find_site(name: str, *, project: Path | None, home: Path | None) -> Site:
    """Read a site by its name, or by its path if that has a ``/`` or ends in ``.yaml``.

    A file in the project's ``site-configs/`` takes precedence over one in ``~/.config/hetctl/site-configs/``,
    and that over those included in hetctl.

    Raises
    ------
    BadInputError
        If there is no such site, or its file has errors.
    """
    return trace_site(name, project=project, home=home)[0]


def list_sites(*, project: Path | None, home: Path | None) -> list[tuple[str, Path]]:
    """Return all names that `find_site` finds, each with the file that it reads."""
    return [(name, paths[0]) for name, paths in sorted(_SiteSearch(project, home).files().items())]


def detect_site(hostname: str, sites: Iterable[Site]) -> str | None:
    """Return the first site with a host pattern that matches; None if there is none."""
    for site in sites:
        if any(fnmatch.fnmatch(hostname, pattern) for pattern in site.host_patterns):
            return site.name
    return None


def site_schema() -> dict[str, Any]:
    """Return the JSON Schema of site files; only a file that extends another may omit keys."""
    schema = model_of(SiteFile).model_json_schema()
    schema["anyOf"] = [{"required": ["extends"]}, {"required": schema.pop("required")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hetctl site"}


@dataclass(frozen=True)
class _SiteSearch:
    project: Path | None
    home: Path | None

    def files(self) -> dict[str, list[Path]]:
        """Return all files of each name, the one of highest precedence first."""
        folders = [Path(str(resources.files("hetctl") / FOLDER))]
        if self.home is not None:
            folders.insert(0, self.home / ".config" / "hetctl" / FOLDER)
        if self.project is not None:
            folders.insert(0, self.project / FOLDER)
        found: dict[str, list[Path]] = {}
        for folder in folders:
            for path in sorted(folder.glob("*.yaml")):
                found.setdefault(path.stem, []).append(path)
        return found

    def locate(self, name: str, folder: Path, without: tuple[Path, ...]) -> Path:
        """Return a site's file; for a file that extends its own name, the next file of that name."""
        if "/" in name or name.endswith(".yaml"):
            return folder / name
        files = self.files()
        for path in files.get(name, []):
            if path.resolve() not in without:
                return path
        if name in files:
            raise BadInputError(f"site '{name}' extends itself")
        raise BadInputError(
            f"unknown site {shown(name)}{suggestion(name, files)}",
            "name a file of yours by its path, or put it into the project as site-configs/NAME.yaml",
        )

    def load(self, path: Path, chain: tuple[Path, ...]) -> YamlSource:
        """Read a file and all files that it extends; `chain` lists the files that refer to it."""
        chain = (*chain, path.resolve())
        source = read_yaml(path)
        base = source.values.get("extends")
        if not isinstance(base, str):
            return source
        try:
            base_path = self.locate(base, path.parent, chain)
        except BadInputError as error:
            raise source.refusal([(("extends",), error.message)]) from None
        # Resolved paths: a cycle through symbolic links would otherwise not be noticed.
        if base_path.resolve() in chain:
            raise source.refusal([(("extends",), f"forms a cycle with {base_path}")])
        return source.extending(self.load(base_path, chain))


def _timeouts_problems(timeouts: Timeouts) -> Iterator[tuple[Location, str]]:
    """Yield the time-outs that are too short for the operations that they have to cover."""
    values = {field.name.removesuffix("_s"): getattr(timeouts, field.name) for field in fields(timeouts)}
    texts = {key: format_duration(seconds) for key, seconds in values.items()}
    least, often = format_duration(LEAST_SILENCE_S), format_duration(HEARTBEAT_EVERY_S)
    for key in ("hang", "silence", "lease"):
        if values[key] < LEAST_SILENCE_S:
            rule = f"must be at least {least}, since a heartbeat comes every {often}, got {texts[key]}"
            yield ("timeouts", key), rule
    for key in WITHOUT_HEARTBEATS:
        # In these waits ranks are silent: a shorter `hang` would end them as hung.
        if values[key] > values["hang"]:
            yield ("timeouts", key), f"must be at most hang, which is {texts['hang']}, got {texts[key]}"
